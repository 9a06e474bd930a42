"""The nodes of the Slurm allocation that this runs in, as a place: an agent each, by srun.

Used inside of `sbatch` (by what `--on slurm` submits) and `salloc`. Every agent is a job step of
its own, so that a node that fails takes its own step only; the allocation outlives it when it was
made with `--no-kill`. Nodes beyond the plan's are spares.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.control.agent import ORPHANED
from paceline.control.host_agents import GONE, LIVES
from paceline.errors import JobError, Problem
from paceline.job import Job, Script
from paceline.launch.hosts import Hosts, HostSite, check_hosts, starts_of
from paceline.launch.places import Inspection, Start
from paceline.launch.requeue import value_of
from paceline.launch.tools import address_among, ask_tool, check_tool
from paceline.plan import Plan
from paceline.record.run import RunFolder
from paceline.units import counted

_VISIT_S = 30.0
"""For a job step to be made and Python to start. A guess: Slurm's MessageTimeout is 10 s."""


_AGENT = (
    f'code=0; "$@" || code=$?; [ $code -ne {ORPHANED} ] || exec "$0" -m paceline.launch.requeue'
)
"""An agent, and what is done when it had no controller any more."""


@dataclass(frozen=True, slots=True)
class Srun:
    """The way to a node of the allocation."""

    python_there: str

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        # Since 22.05 srun does not take it over from sbatch or salloc by itself.
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        return [
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"),
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            # Each rank finds its own cores; the step has all of its node's share.
            *("--cpu-bind=none", "--mpi=none", "--quit-on-interrupt", *words),
        ]

    def is_unreached(self, returncode: int) -> bool:
        """srun has no exit code of its own for it: whatever is not the agent's or the visit's."""
        return returncode not in (GONE, LIVES)

    def python(self, module: str, *words: str) -> list[str]:
        run = [self.python_there, "-m", module, *words]
        if module != "paceline.control.agent":
            return run
        return ["sh", "-c", _AGENT, self.python_there, *run]

    @property
    def minds_end(self) -> bool:
        return True

    @property
    def patience_s(self) -> float:
        return _VISIT_S


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    if "SLURM_JOB_ID" not in os.environ:
        yield Problem(
            code="W014",
            what="this is no Slurm allocation",
            where="SLURM_JOB_ID",
            fix="submit the job with --on slurm, or make an allocation first: "
            f"salloc --no-kill --nodes={'N' if plan is None else plan.cluster.num_nodes}",
        )
        return
    fix = "load Slurm's module in slurm.setup, or ask for it"
    if missing := list(check_tool("srun", "scontrol", fix=fix)):
        yield from missing
        return
    try:
        names = node_names()
    except JobError as error:
        yield from error.problems
        return
    if plan is not None and len(names) < plan.cluster.num_nodes:
        yield Problem(
            code="W008",
            what=f"the plan has {counted(plan.cluster.num_nodes, 'node')}, the allocation "
            f"{len(names)}",
            where="SLURM_JOB_NODELIST",
            fix=f"ask for {plan.cluster.num_nodes}, or --set cluster.nodes={len(names)}",
        )


def node_names() -> list[str]:
    """The allocation's nodes, as scontrol writes them out.

    Raises:
        JobError: `W011`, scontrol does not answer.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    done = ask_tool(["scontrol", "show", "hostnames", listed])
    if done.returncode or not done.stdout.split():
        raise JobError.of(
            code="W011",
            what=f"scontrol does not know the nodes {listed!r}: {done.stderr.strip()}",
            where="SLURM_JOB_NODELIST",
            fix="see whether Slurm works here: scontrol ping",
        )
    return done.stdout.split()


def starts(job: Job, plan: Plan, run: RunFolder) -> list[Start]:
    """The agents that would be started, on nodes without names where there is no allocation."""
    way = Srun(job.spec.slurm.python or sys.executable)
    nodes = plan.cluster.num_nodes
    if "SLURM_JOB_ID" not in os.environ:
        return starts_of(way, run, [f"NODE-{node}" for node in range(nodes)])
    return starts_of(way, run, node_names()[:nodes])


def open_site(
    job: Job,
    plan: Plan,
    run: RunFolder,
    on_note: Callable[[str], None],
    inspection: Inspection | None,
) -> HostSite:
    way = Srun(job.spec.slurm.python or sys.executable)
    hosts = Hosts(
        run=run,
        names=tuple(node_names()),
        num_nodes=plan.cluster.num_nodes,
        way=way,
        place="slurm",
    )
    check_hosts(hosts, on_note, inspection)
    own = os.environ.get("SLURMD_NODENAME")
    return HostSite(hosts, address_among(address_of(each) for each in hosts.names if each != own))


def address_of(node: str) -> str:
    """What Slurm itself reaches a node by, which need not be its name."""
    said = ask_tool(["scontrol", "--oneliner", "show", "node", node]).stdout
    return value_of(said, "NodeAddr") or node

"""The nodes of a Ray cluster as a place: an agent each, started by a Ray actor.

The controller is the command that was started, on any machine of the cluster; `ray job submit --
paceline run job.yaml --on ray` starts it there. Recovery, drills and records are those of a run on
this machine; Ray only says which nodes there are, and keeps their resources. Nodes beyond the
plan's are spares.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.errors import JobError, Problem
from paceline.job import Job, Script
from paceline.job.packages import install_line
from paceline.launch.hosts import Hosts, HostSite, check_hosts, starts_of
from paceline.launch.places import Inspection, Start
from paceline.launch.ray_step import UNREACHED
from paceline.launch.tools import Silent, address_among, ask_tool
from paceline.plan import Plan
from paceline.record.run import RunFolder
from paceline.units import counted

_VISIT_S = 60.0
"""To connect to Ray, start an actor there, and Python in it. A guess: 10 s on a busy machine."""

_STEP = "paceline.launch.ray_step"
_STAYS = {"paceline.control.agent", "paceline.launch.on_node"}
"""Programs that stay on their node, and so keep its resources."""


@dataclass(frozen=True, slots=True)
class Through:
    """The way to a node, by `ray_step`."""

    cpus: float
    gpus: float
    """What an agent keeps of its node: Ray gives it to nobody else. A visit keeps nothing."""

    python_there: str
    address: str | None

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        kept = (self.cpus, self.gpus) if _STAYS & {*words} else (0.0, 0.0)
        return [
            *_step(self.address),
            *("--node", host, f"--cpus={kept[0]:g}", f"--gpus={kept[1]:g}", "--", *words),
        ]

    def is_unreached(self, returncode: int) -> bool:
        return returncode == UNREACHED

    def python(self, module: str, *words: str) -> list[str]:
        return [self.python_there, "-m", module, *words]

    @property
    def minds_end(self) -> bool:
        return False  # it passes on one line

    @property
    def patience_s(self) -> float:
        return _VISIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as Ray has it."""

    name: str
    address: str
    cpus: float
    gpus: float


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    """Whether Ray is installed; no cluster is asked."""
    if importlib.util.find_spec("ray") is None:
        yield Problem(
            code="W020",
            what="ray is not installed",
            where="this Python",
            fix=f"{install_line('ray')}, of the cluster's version, or see what would be "
            "started with --dry-run",
        )


def starts(job: Job, plan: Plan, run: RunFolder) -> list[Start]:
    names = [f"RAY-NODE-{node}" for node in range(plan.cluster.num_nodes)]
    return starts_of(_way(job, plan), run, names)


def open_site(
    job: Job,
    plan: Plan,
    run: RunFolder,
    on_note: Callable[[str], None],
    inspection: Inspection | None,
) -> HostSite:
    """The nodes that have room for the plan's ranks, each with the run's folder and this Paceline.

    Raises:
        JobError: `W030`, there is no cluster; `W008`, it has too few such nodes.
    """
    cluster = plan.cluster
    needs_gpu = cluster.backend == "nccl"
    ranks = cluster.ranks_per_node
    spec = job.spec.ray
    nodes = find_nodes(spec.address)
    able = [each for each in nodes if (each.gpus if needs_gpu else each.cpus) >= ranks]
    if len(able) < cluster.num_nodes:
        kind = "GPUs" if needs_gpu else "CPUs"
        there = ", ".join(f"{each.gpus if needs_gpu else each.cpus:g}" for each in nodes)
        raise JobError.of(
            code="W008",
            what=f"the plan has {counted(cluster.num_nodes, 'node')} of {ranks} {kind}, and "
            f"{len(able)} of Ray's {counted(len(nodes), 'node')} can hold so many ({there})",
            where=job.where("cluster"),
            fix="start more nodes (`ray start --address=...`), or set cluster.nodes and "
            "cluster.per_node to what there is",
        )
    hosts = Hosts(
        run=run,
        names=tuple(each.name for each in able),
        num_nodes=cluster.num_nodes,
        way=_way(job, plan),
        place="ray",
    )
    check_hosts(hosts, on_note, inspection)
    return HostSite(hosts, address_among(node.address for node in able))


def _way(job: Job, plan: Plan) -> Through:
    ranks = float(plan.cluster.ranks_per_node)
    needs_gpu = plan.cluster.backend == "nccl"
    return Through(
        cpus=0.0 if needs_gpu else ranks,
        gpus=ranks if needs_gpu else 0.0,
        python_there=job.spec.ray.python or sys.executable,
        address=job.spec.ray.address,
    )


def find_nodes(address: str | None) -> list[Node]:
    """The cluster's nodes that are alive, in a process of its own: Ray changes the one it is in.

    Raises:
        JobError: `W030`, no cluster answers.
    """
    try:
        done = ask_tool([*_step(address), "--list"], limit_s=_VISIT_S)
    except Silent as error:
        raise JobError(_no_cluster(address, str(error))) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise JobError(_no_cluster(address, said[-1]))
    return [Node(**each) for each in json.loads(lines[-1])]


def _no_cluster(address: str | None, why: str) -> Problem:
    return Problem(
        code="W030",
        what=f"no Ray cluster answers: {why}",
        where=address or "RAY_ADDRESS, or a cluster that runs on this machine",
        fix="run this on a node of the cluster, or through it: ray job submit -- paceline run "
        "job.yaml --on ray",
    )


def _step(address: str | None) -> list[str]:
    words = [sys.executable, "-m", _STEP]
    return words if address is None else [*words, f"--address={address}"]

"""How the ranks of a plan are started: torchrun's options, the environment variables that are set,
and those that are removed, each with its reason.

Not here: variables that only one engine reads, which its renderer adds.
"""

import shlex
from dataclasses import dataclass

from paceline.catalog.nccl import unwanted
from paceline.job import Job
from paceline.plan import Plan
from paceline.units import counted

PORT = 29500
"""PyTorch's usual port of the rendezvous."""

RECORDED_COLLECTIVES = 2000
"""How many of a rank's last collectives the flight recorder keeps: a minute's and more of most
layouts, in less than a MiB of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable of every rank."""

    name: str
    value: str
    reason: str
    """Why it is set, and so: one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """An environment variable that people leave set and that harms this plan."""

    name: str
    reason: str
    """What it does: one line."""


def environment(plan: Plan) -> list[Variable]:
    """What every rank needs set; whatever has no reason is left to the library."""
    backend = plan.cluster.backend
    if backend == "gloo":
        return [_threads(plan), *_loopback(plan)]
    return [_threads(plan), *_records(), *_segments(plan)] if backend == "nccl" else []


def removals_anywhere() -> list[Removal]:
    """Those that harm whatever runs on a machine, with or without a network that has RDMA."""
    return [*_NCCL, *_MLX]


def removals(plan: Plan) -> list[Removal]:
    """What must not be left set from another machine, an older library or a day of debugging.

    Source: NCCL's user guide, env.html (2.30); PyTorch's torch.distributed and
    ProcessGroupNCCL environment variables (2.13); mlx issue 3142.
    """
    if plan.cluster.backend == "mlx":
        return [*_MLX]
    if plan.cluster.backend != "nccl":
        return []
    return [*_NCCL, *(_RDMA if plan.cluster.uses_rdma else ())]


def export_lines(plan: Plan, *, restarts: bool = False) -> list[str]:
    """The environment as lines of a POSIX shell, each with its reason as a comment.

    `unset` takes away what does not exist without a word, also under `set -u`.

    Args:
        plan: Its network and ranks.
        restarts: What is started restarts ranks itself, as torchrun does with `--max-restarts`.
    """
    wanted = [*environment(plan), *([_NEW_STORE] if restarts else [])]
    sets = [f"export {each.name}={shlex.quote(each.value)}  # {each.reason}" for each in wanted]
    unsets = [f"unset {each.name}  # {each.reason}" for each in removals(plan)]
    return [*sets, *([_WHY_UNSET] if unsets else []), *unsets]


_WHY_UNSET = "# These slow a run down or end it, where a shell or a cluster profile sets them:"


def restart_words(job: Job, *, own: str = "") -> list[str]:
    """What follows a failure of what `launch.sh` starts with torchrun: lines for its head.

    Args:
        own: What it says of a script of one's own, where the file can start one.
    """
    most = job.spec.recovery.max_restarts
    if most:
        return [
            f"After a failure torchrun restarts all ranks, {counted(most, 'time')} at most, from",
            f"the newest whole checkpoint{own}. This file",
            "resumes there too when you run it again.",
        ]
    return [
        "After a failure torchrun starts nothing again (--max-restarts=0): run this file again on",
        "every node, and it resumes from the newest whole checkpoint. Under `paceline run` the",
        "controller does that.",
    ]


def torchrun_options(plan: Plan, *, least_nodes: int | None = None) -> list[str]:
    """Words of a shell after `torchrun`, run on every node; quoted where they need it.

    Args:
        plan: Its nodes and ranks.
        least_nodes: The job starts and goes on with so many; left out, with all of them.
    """
    cluster = plan.cluster
    ranks = f"--nproc-per-node={cluster.ranks_per_node}"
    if cluster.num_nodes == 1:
        return ["--standalone", ranks]
    least = "" if least_nodes in (None, cluster.num_nodes) else f"{least_nodes}:"
    return [
        f"--nnodes={least}{cluster.num_nodes}",
        ranks,
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT"',
        '--rdzv-id="$RUN_ID"',
    ]


def meeting_lines(plan: Plan, *, has_name: bool = True) -> list[str]:
    """Lines of a shell that end a script which does not know where the nodes meet; on one node,
    none.

    Args:
        plan: Its nodes.
        has_name: The rendezvous has a name, as torchrun's.
    """
    if plan.cluster.num_nodes == 1:
        return []
    lines = [
        ': "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"',
        f': "${{HEAD_PORT:={PORT}}}"',
    ]
    name = ': "${RUN_ID:?set it to one name for the run, the same on every node}"'
    return [*lines, name] if has_name else lines


def _threads(plan: Plan) -> Variable:
    cores = plan.cluster.cores_per_rank
    if cores is None or plan.cluster.num_nodes > 1:  # it is this machine's, shared by all nodes
        why = "set it to (cores of a node) / (ranks on it): the job file does not give the cores"
        return Variable(name="OMP_NUM_THREADS", value="1", reason=why)
    threads = max(1, int(cores))
    why = f"cores for each rank: {cores:g}; more threads than that wait for each other"
    return Variable(name="OMP_NUM_THREADS", value=str(threads), reason=why)


def _loopback(plan: Plan) -> list[Variable]:
    if plan.cluster.num_nodes > 1:
        return []
    why = "one node: gloo else takes the host name's address, which a container may not have"
    return [Variable(name="GLOO_SOCKET_IFNAME", value="lo", reason=why)]


def _records() -> list[Variable]:
    return [
        Variable(
            name="TORCH_NCCL_DUMP_ON_TIMEOUT",
            value="1",
            reason="at a time-out every rank dumps its last collectives, for torchfrtrace",
        ),
        Variable(
            name="TORCH_FR_BUFFER_SIZE",
            value=str(RECORDED_COLLECTIVES),
            reason="how many collectives a rank keeps for that",
        ),
    ]


def _segments(plan: Plan) -> list[Variable]:
    """Where blocks of many sizes come and go. Not on AMD: the setting is NVIDIA's driver's."""
    layout = plan.layout
    varies = layout.sharding in ("zero2", "full", "hybrid") or layout.pipeline > 1
    if not varies or plan.cluster.accelerator.startswith("MI"):
        return []
    why = "less fragmentation where blocks of many sizes are gathered (torch 2.9 and newer)"
    return [
        Variable(name="PYTORCH_ALLOC_CONF", value="expandable_segments:True", reason=why),
    ]


_NEW_STORE = Variable(
    name="TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    value="1",
    reason="a restart uses a new store: the old one has addresses of ranks that ended",
)
"""Seen with torch 2.13: torchrun keeps its store over restarts, without a prefix for each
(torch/distributed/rendezvous.py, `_create_c10d_store`), and a rank that comes 10 s before another
connects to where that one was, four times in vain."""


def _removals(table: str) -> tuple[Removal, ...]:
    return tuple(Removal(name=row.name, reason=row.reason) for row in unwanted(table).values())


_NCCL = _removals("removed_nccl")

_RDMA = _removals("removed_rdma")

_MLX = _removals("removed_mlx")

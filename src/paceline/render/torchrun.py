"""torchrun: one launch script, run on every node, and the environment of its ranks.

Leaves out: who runs it there; `render/slurm.py` and others do that.
"""

from collections.abc import Iterator
from dataclasses import replace

from paceline.estimate.estimate import price_one
from paceline.job import Job
from paceline.parallel.abilities import EXAMPLES_OVER
from paceline.parallel.shrink import shrunk
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.render.carried import OF_DDP
from paceline.render.device import accelerator_refusals
from paceline.render.engine import Files, Gap
from paceline.render.environment import (
    export_lines,
    meeting_lines,
    restart_words,
    torchrun_options,
)
from paceline.render.example import example, example_gaps, node_lines, program_lines
from paceline.render.shared_gaps import offload_gaps, precision_gaps, split_gaps
from paceline.render.shell import script
from paceline.render.text import header

OWN = "launch.sh starts your own TRAIN_SCRIPT on the same ranks"

CARRIES = OF_DDP | {"recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`launch.sh`, and the example program."""
    return {"launch.sh": launch_script(plan, job)} | example(
        plan, job, "train_torchrun.py", "lm.py"
    )


def launch_script(plan: Plan, job: Job) -> str:
    """What is run on every node: the environment, then torchrun with TRAIN_SCRIPT or train.py."""
    restarts = job.spec.recovery.max_restarts
    least = least_nodes(plan, job)
    options = [*torchrun_options(plan, least_nodes=least), f"--max-restarts={restarts}"]
    return script(
        header(plan, job, *_about(plan, job, least)),
        'cd "$(dirname "$0")"',
        *program_lines(plan),
        *node_lines(plan, job),
        *export_lines(plan, restarts=restarts > 0),
        *meeting_lines(plan),
        *_continued("exec torchrun", *options, '"${TRAIN_SCRIPT:-train.py}" "$@"'),
    )


def least_nodes(plan: Plan, job: Job) -> int:
    """The fewest nodes that the job may go on with: with every number from there to all of them
    the global batch divides into the plan's micro-batches, and memory suffices.

    All of them where the job does not let the run shrink.
    """
    cluster, layout = plan.cluster, plan.layout
    least = cluster.num_nodes
    if not job.spec.recovery.shrink:
        return least
    for nodes in range(cluster.num_nodes - 1, 0, -1):
        small = shrunk(layout, nodes * cluster.ranks_per_node)
        if small is None or small.num_ranks != nodes * cluster.ranks_per_node:
            break
        if small.micro_batch != layout.micro_batch or small.batch is not None:
            break
        case = case_of_plan(plan, replace(cluster, num_nodes=nodes))
        if price_one(small, case).memory.known_bytes > plan.limit_bytes:
            break
        least = nodes
    return least


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What torchrun cannot start, and what the example program lacks: torchrun itself says nothing
    about a layout. Of accelerators that it does not know, that alone."""
    cluster = plan.cluster
    if cluster.backend not in EXAMPLES_OVER:
        return [
            Gap(
                what=f"{cluster.accelerator} through {cluster.backend}",
                where="cluster.accelerator",
                why="the example program knows CUDA, ROCm and CPUs, and is not written here",
                nearest=OWN,
            )
        ]
    no_mac = accelerator_refusals(
        plan,
        uses=("nccl", "gloo"),
        why="torchrun starts PyTorch over NCCL or gloo, and neither uses a Mac's GPU",
    )
    return [*no_mac, *_layout_gaps(plan), *example_gaps(plan, job)]


def _layout_gaps(plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    why = (
        "torchrun only starts ranks: the script splits the model, and the example program splits "
        "data and parameters alone"
    )
    yield from split_gaps(plan, why, OWN)
    if layout.sharding == "zero1" and layout.data > 1:
        yield Gap(
            what=layout.name,
            where="layout.sharding",
            why="fully_shard (torch 2.13) has no way to shard optimizer state alone",
            nearest="ZeRO-2: reduced gradients are sharded too, the same numbers in less memory",
            fix="layout.sharding: zero2",
        )
    moved = "fully_shard (torch 2.13) moves parameters and gradients with it, or nothing"
    yield from offload_gaps(plan, moved, OWN)
    lacks = ("the example program has no loss scaler and no fp8 kernels", OWN)
    yield from precision_gaps(plan, dict.fromkeys(("fp16", "fp8"), lacks))


def _about(plan: Plan, job: Job, least: int) -> list[str]:
    nodes = plan.cluster.num_nodes
    found = ["", *restart_words(job, own=" (a script of your own loads its own)")]
    if nodes == 1:
        return found
    found += [
        "Run this on every node, in a folder that all of them see: checkpoints/ is written there.",
        "The first node keeps the rendezvous: the job ends with it.",
    ]
    if least == nodes:
        return [*found, f"It starts when all {nodes} nodes are there."]
    return [
        *found,
        f"It starts with {least} to {nodes} nodes, 30 s after {least} came. One that comes or goes",
        "restarts all ranks, which is not counted. The batch is the same on any of them: fewer",
        "ranks do more micro-batches. Your own TRAIN_SCRIPT must do that as well.",
    ]


def _continued(*words: str) -> list[str]:
    """One command over several lines."""
    *most, last = words
    start, *options = most
    return [f"{start} \\", *(f"  {each} \\" for each in options), f"  {last}"]

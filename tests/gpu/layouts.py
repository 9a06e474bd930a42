"""Ten layouts of 64 ranks, of which this process plays one with real tensors under a fake group."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.parallel.rank_map import rank_of
from paceline.plan import Plan, plan_job
from paceline.prove import model as models
from paceline.prove.places import Places
from paceline.prove.request import request_of
from paceline.prove.step import Rank
from paceline.prove.world import traced_layout, world
from paceline.runtime import strategy
from paceline.runtime.determinism import set_deterministic
from paceline.runtime.devices import synchronize
from paceline.runtime.strategy.ways.known import ways_of
from paceline.spec import Job, parse_job

LAYOUTS = {
    "DDP": "sharding: none",
    "ZeRO-1": "sharding: zero1",
    "ZeRO-2": "sharding: zero2",
    "FSDP2": "sharding: full",
    "hybrid": "sharding: hybrid, shard: 8",
    "tensor 8 + FSDP2": "sharding: full, tensor: 8",
    "pipeline 4, first": "sharding: none, pipeline: 4",
    "pipeline 4, last": "sharding: none, pipeline: 4",
    "context 8": "sharding: full, context: 8",
    "recompute": "sharding: full, recompute: full",
}
"""Name -> the job's `layout` section."""

SIZES = {
    "cuda": ("{layers: 16, hidden: 2048, heads: 16, vocab: 32000}", 4096, 8, 8),
    "cpu": ("{layers: 4, hidden: 64, heads: 8, vocab: 256}", 64, 8, 8),
}
"""Device -> the decoder, tokens of a sample, nodes and ranks of a node. About 0.95 billion
parameters on a GPU: DDP holds 15 GB of state."""


def job_of(layout: str, device: str, accelerator: str) -> Job:
    """The job of one layout: one sample a data rank and micro-batch."""
    decoder, seq_len, nodes, per_node = SIZES[device]
    memory = ", memory: 64GiB" if device == "cpu" else ""  # of a simulated node: nothing is held
    text = f"""\
model: {{decoder: {decoder}}}
data: {{corpus: python-stdlib, seq_len: {seq_len}}}
train: {{global_batch: {nodes * per_node}, steps: 1}}
cluster: {{accelerator: {accelerator}, nodes: {nodes}, per_node: {per_node}{memory}}}
layout: {{micro_batch: 1, {layout}}}
"""
    return parse_job(text, source="kit", folder=Path())


@contextmanager
def real_rank(job: Job, plan: Plan, rank: int, device: torch.device) -> Iterator[Rank]:
    """That rank with tensors that have values, its optimizer state there after one step.

    The fake group answers at once and sends nothing: values mean nothing, times are compute's.
    """
    request = request_of(job, plan)
    layout = traced_layout(request.layout)
    precision: Any = request.precision
    silent: Any = SimpleNamespace(places=Places(), mark=lambda tensors, part: None)
    with world(rank, layout.num_ranks), torch.device(device):
        meshes = strategy.make_meshes(layout, device.type)
        with torch.device("meta"):
            model = models.build(request.model, request.seq_len)
        ways = ways_of(model)
        if layout.shard_degree == 1:  # DDP's hooks want values; FSDP2 shards what has none yet
            models.give_memory(model, str(device))
        model = strategy.apply(model, layout, meshes, precision=precision, ways=ways)
        if layout.shard_degree != 1:
            models.give_memory(model, str(device))
        made = Rank(
            model,
            meshes,
            silent,
            precision=precision,
            optimizer=request.optimizer,
            seq_len=request.seq_len,
        )
        made.step()
        yield made


def measure(name: str, device: str, accelerator: str, *, deterministic: bool) -> dict[str, Any]:
    """The allocator's peaks of one step, None where nobody counts, and the median of ten."""
    set_deterministic(deterministic)
    job, where = job_of(LAYOUTS[name], device, accelerator), torch.device(device)
    plan = plan_job(job)
    stage = stage_of(name, plan)
    with real_rank(job, plan, rank_of(plan.layout, pipeline=stage), where) as made:
        peak, reserved = peaks(made.step, where)
        return {"peak": peak, "reserved": reserved, "seconds": median_s(made.step, where)}


def stage_of(name: str, plan: Plan) -> int:
    """The pipeline stage that a layout's rank stands in."""
    return plan.layout.pipeline - 1 if name.endswith("last") else 0


def peaks(step: Callable[[], object], device: torch.device) -> tuple[int | None, int | None]:
    """Allocated and reserved at the most in one step; None where nobody counts."""
    if device.type != "cuda":
        step()
        return None, None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """Of 10 calls after 3."""
    times = []
    for _ in range(13):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


if __name__ == "__main__":  # a process for each layout: torch keeps process groups' names
    name, device, accelerator, deterministic = sys.argv[1:]
    found = measure(name, device, accelerator, deterministic=deterministic == "on")
    print(json.dumps(found), flush=True)
    os._exit(0)

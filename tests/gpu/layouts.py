"""Layouts of 64 ranks, of which this process plays one with real tensors under a fake group."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.job import Job, parse_job
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
from paceline.runtime.initial.fill import give_memory
from paceline.runtime.strategy.ways.find import ways_of

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
    "experts 8": "sharding: full, expert: 8",
}
"""Name -> the job's `layout` section."""

EXPERTS = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 8}
"""Beside what a Mixtral has by default, on a GPU; a CPU computes a sixteenth of each width."""

SIZES = {
    "cuda": ("{decoder: {layers: 16, hidden: 2048, heads: 16, vocab: 32000}}", 4096, 8, 8),
    "small cuda": ("{decoder: {layers: 8, hidden: 2048, heads: 16, vocab: 32000}}", 2048, 8, 8),
    "cpu": ("{decoder: {layers: 4, hidden: 64, heads: 8, vocab: 256}}", 64, 8, 8),
}
"""Device -> the decoder, tokens of a sample, nodes and ranks of a node. About 0.95 billion
parameters on a GPU, of which DDP holds 15 GB of state; half of them on a small one."""

SMALL_GIB = 30
"""A GPU with less memory is small: DDP takes 24.5 GiB else, and 12.1 GiB there, by the plan's
estimate."""

CALLS = {"cuda": (3, 10), "cpu": (1, 2)}
"""Device -> calls that are not timed, and those that are."""


def job_of(layout: str, device: str, accelerator: str) -> Job:
    """The job of one layout: one sample a data rank and micro-batch."""
    is_small = device == "cuda" and torch.cuda.mem_get_info()[1] < SMALL_GIB * 2**30
    model, seq_len, nodes, per_node = SIZES["small cuda" if is_small else device]
    folder = Path()
    if "expert:" in layout:
        model, folder = "{hf_config: config.json}", _experts(device)
    memory = ", memory: 64GiB" if device == "cpu" else ""  # of a simulated node: nothing is held
    text = f"""\
model: {model}
data: {{corpus: python-stdlib, seq_len: {seq_len}}}
train: {{global_batch: {nodes * per_node}, steps: 1}}
cluster: {{accelerator: {accelerator}, nodes: {nodes}, per_node: {per_node}{memory}}}
layout: {{micro_batch: 1, {layout}}}
"""
    return parse_job(text, source="kit", folder=folder)


def _experts(device: str) -> Path:
    """A folder with the configuration of a small model of experts; needs transformers."""
    folder = Path(tempfile.gettempdir()) / f"paceline-kit-{os.getuid()}-{device}"
    folder.mkdir(exist_ok=True)
    widths, heads = (16, 4) if device == "cpu" else (1, 16)
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": EXPERTS["hidden_size"] // widths,
        "intermediate_size": EXPERTS["intermediate_size"] // widths,
        "num_hidden_layers": EXPERTS["num_hidden_layers"] // (4 if device == "cpu" else 1),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 256 if device == "cpu" else 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _as_sent(received: Tensor, sent: Tensor, *_: object, **__: object) -> None:
    """Experts' ranks tell each other how many rows come: as many as this one sends. The fake group
    would leave whatever the memory held."""
    received.copy_(sent)


@contextmanager
def real_rank(job: Job, plan: Plan, rank: int, device: torch.device) -> Iterator[Rank]:
    """That rank with tensors that have values, its optimizer state there after one step.

    The fake group answers at once and sends nothing: values mean nothing, times are compute's.
    """
    request = request_of(job, plan)
    layout = traced_layout(request.layout)
    precision: Any = request.precision
    silent: Any = SimpleNamespace(places=Places(), mark=lambda tensors, part: None)
    told = patch.object(dist, "all_to_all_single", _as_sent) if layout.expert > 1 else nullcontext()
    with world(rank, layout.num_ranks), torch.device(device), told:
        meshes = strategy.make_meshes(layout, device.type)
        with torch.device("meta"):
            model = models.build(request.model, request.seq_len)
        ways = ways_of(model)
        if layout.shard_degree == 1:  # DDP's hooks want values; FSDP2 shards what has none yet
            give_memory(model, device)
        model = strategy.apply(model, layout, meshes, precision=precision, ways=ways)
        if layout.shard_degree != 1:
            give_memory(model, device)
        made = Rank(
            model,
            meshes,
            silent,
            precision=precision,
            optimizer=request.optimizer,
            seq_len=request.seq_len,
            ways=ways,
        )
        made.step()
        yield made


def measure(name: str, device: str, accelerator: str, *, deterministic: bool) -> dict[str, Any]:
    """The allocator's peaks of one step, None where nobody counts, and a step's median."""
    set_deterministic(deterministic)
    if device == "cpu":
        torch.set_num_threads(1)  # the tests' machines have few cores, and other work
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
    """Of the calls after the first ones."""
    first, counted = CALLS[device.type]
    times = []
    for _ in range(first + counted):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[first:])


if __name__ == "__main__":  # a process for each layout: torch keeps process groups' names
    name, device, accelerator, deterministic = sys.argv[1:]
    found = measure(name, device, accelerator, deterministic=deterministic == "on")
    print(json.dumps(found), flush=True)
    os._exit(0)

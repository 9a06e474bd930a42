"""Host memory that building a model takes at its peak, for one rank of FSDP2 over 4.

    .venv/bin/python benchmarks/build_memory.py [--before PATH] [--layers N]

The built-in decoder with 1.1 billion parameters, in float32, on CPUs. Four ranks build it over
gloo: recorded on meta, split, and each draws its own shard. `--before` is a checkout of commit
f7dad3a, in which every rank built the whole model and cut its shard out of it; there one rank is
run and the other three are pretended, as four whole models may not fit this machine. A smaller
model of the same kind is built first, so that imports do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

RANKS = 4
WITHIN = 1.15
"""Of the shard's size, the most that a rank may need at its peak, beside a constant."""

BESIDE = 64 << 20
"""That constant: the block that is drawn, and what the allocator keeps of earlier ones."""


def main() -> None:
    """Print both figures; exit with 1 where today's is over the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="a checkout of commit f7dad3a")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        print(json.dumps(measure(asked.rank, asked.store, asked.layers)))
        return
    from figures import machine

    print(f"measured; {machine()}")
    if asked.before is not None:
        show("before", run(asked.before, asked.layers, range(1)))
    seen = run(Path(__file__).parents[1], asked.layers, range(RANKS))
    show("now", seen)
    over = [each for each in seen if each["peak"] > WITHIN * each["shard"] + BESIDE]
    print(f"limit: {WITHIN} x the shard and {BESIDE >> 20} MiB")
    sys.exit(1 if over else 0)


def run(checkout: Path, layers: int, ranks: range) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store" if len(ranks) > 1 else ""
        words = [sys.executable, __file__, "--layers", str(layers), "--store", store]
        env = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*words, "--rank", str(rank)], env=env, stdout=subprocess.PIPE)
            for rank in ranks
        ]
        told = [each.communicate()[0] for each in running]
    return [json.loads(each.splitlines()[-1]) for each in told]


def show(name: str, seen: list[dict[str, Any]]) -> None:
    """The fullest rank."""
    worst = max(seen, key=lambda each: each["peak"])
    print(
        f"{name:7} {worst['parameters'] / 1e9:.2f} B parameters: peak {worst['peak'] / 2**20:,.0f} "
        f"MiB over {worst['start'] / 2**20:,.0f} MiB at the start, shard "
        f"{worst['shard'] / 2**20:,.0f} MiB, {worst['peak'] / worst['shard']:.2f} x; "
        f"{len(seen)} rank(s) measured, {worst['seconds']:.1f} s"
    )


def measure(rank: int, store: str, layers: int) -> dict[str, Any]:
    """Bytes of one rank, on the code that PYTHONPATH names."""
    import time

    import torch.distributed as dist

    from paceline.parallel.layout import Layout
    from paceline.profile import DecoderShape
    from paceline.runtime import strategy

    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    layout = Layout(data=RANKS, sharding="full", micro_batch=1, accumulation=1)
    meshes = strategy.make_meshes(layout, "cpu")
    shape = DecoderShape(
        layers=layers,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn=8192,
        vocab=32000,
        tied_embeddings=False,
    )
    build(replace(shape, layers=1, hidden=256, ffn=64, vocab=64), layout, meshes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    start, begun = _status("VmRSS"), time.perf_counter()
    model = build(shape, layout, meshes)
    seconds, peak = time.perf_counter() - begun, _status("VmHWM") - start
    shard = sum(strategy.local_of(each).nbytes for each in model.parameters())
    if store:
        dist.barrier()
    dist.destroy_process_group()
    return {
        "start": start,
        "peak": peak,
        "shard": shard,
        "parameters": sum(each.numel() for each in model.parameters()),
        "seconds": seconds,
    }


def build(shape: Any, layout: Any, meshes: Any) -> Any:
    """The decoder, split, as `Session.build` does it."""
    import torch

    from paceline.runtime import strategy
    from paceline.runtime.decoder import Decoder

    try:
        from paceline.runtime.initial.blueprint import Blueprint
        from paceline.runtime.initial.fill import Filler
    except ModuleNotFoundError:  # the code before
        torch.manual_seed(1)
        whole = [Decoder(shape, 128)]
        return strategy.apply(whole.pop(), layout, meshes, precision="fp32")
    blueprint = Blueprint(lambda: Decoder(shape, 128), 1)
    return strategy.apply(
        blueprint.take_model(),
        layout,
        meshes,
        precision="fp32",
        fill=Filler(blueprint, torch.device("cpu")),
    )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

"""Helper process: measure what this machine reaches. One process for each rank.

    python -m paceline.runtime.calibrate --seconds 60 --device cpu --answer FILE

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are what torchrun sets;
`launch/calibrate.py` sets them for the ranks of one machine. Rank 0 writes a `Measurements` as JSON
into FILE, and how far it is on standard error.
"""

import argparse
import os
import platform
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import paceline
from paceline.catalog.measured import Measurements
from paceline.runtime.calibrate.attention import measure_attention
from paceline.runtime.calibrate.clock import Clock
from paceline.runtime.calibrate.collectives import measure_collectives
from paceline.runtime.calibrate.memory import measure_memory
from paceline.runtime.calibrate.products import measure_products, measure_sustained

_SHARES = {"products": 0.5, "sustained": 0.12, "attention": 0.18, "memory": 0.05}
"""Shares of the time; collectives have the rest. On a CPU, whose clock hardly falls, products have
what the long loop would take."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--answer", type=Path, required=True, help="what rank 0 writes")
    parser.add_argument("--store", help="a file where the ranks meet; left out, torchrun's")
    parser.add_argument("--bf16", action="store_true", help="the CPU has bf16 instructions")
    options = parser.parse_args()
    rank, world = _env("RANK", 0), _env("WORLD_SIZE", 1)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", _env("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
    if world > 1:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"file://{options.store}" if options.store else "env://",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=120 + options.seconds),
        )
    clock = Clock(device=device, seconds=options.seconds, rank=rank)
    measured = measure(
        clock,
        device,
        seconds=options.seconds,
        ranks_per_node=_env("LOCAL_WORLD_SIZE", world),
        has_bf16=options.bf16,
    )
    if rank == 0:
        options.answer.write_bytes(msgspec.json.encode(measured))
    if world > 1:
        dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


def measure(
    clock: Clock, device: torch.device, *, seconds: float, ranks_per_node: int, has_bf16: bool
) -> Measurements:
    """All parts, one after the other; every rank does the same at the same time."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    spare = 0.0 if world > 1 else 1 - sum(_SHARES.values())
    skipped: list[str] = []
    is_cpu = device.type == "cpu"
    for_products = _SHARES["products"] + spare + (_SHARES["sustained"] if is_cpu else 0.0)
    with clock.part("products", for_products * seconds):
        products = measure_products(clock, device, _precisions(device, has_bf16), skipped)
    sustained = []
    if not is_cpu:
        with clock.part("a long loop of products", _SHARES["sustained"] * seconds):
            sustained = measure_sustained(clock, device, products)
    with clock.part("attention", _SHARES["attention"] * seconds):
        attention = measure_attention(clock, device, skipped)
    with clock.part("memory", _SHARES["memory"] * seconds):
        memory = measure_memory(clock, device)
    collectives = []
    if world > 1:
        with clock.part("collectives", seconds):
            collectives = measure_collectives(clock, device, ranks_per_node=ranks_per_node)
    return Measurements(
        device="cpu" if is_cpu else torch.cuda.get_device_name(device),
        backend="gloo" if is_cpu else "nccl",
        num_ranks=world,
        ranks_per_node=ranks_per_node,
        threads=torch.get_num_threads(),
        versions=_versions(device),
        at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=time.monotonic() - clock.began,
        products=tuple(products),
        sustained=tuple(sustained),
        attention=tuple(attention),
        memory=tuple(memory),
        collectives=tuple(collectives),
        skipped=tuple(skipped),
    )


def _precisions(device: torch.device, has_bf16: bool) -> list[str]:
    if device.type == "cpu":
        return ["fp32", "bf16"] if has_bf16 else ["fp32"]
    if torch.version.hip is not None:
        return ["bf16", "fp16"]
    capability = torch.cuda.get_device_capability(device)
    found = ["fp16"] if capability < (8, 0) else ["bf16", "fp16", "tf32"]
    return found + (["fp8"] if capability >= (8, 9) else [])


def _versions(device: torch.device) -> dict[str, str]:
    found = {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        if torch.version.hip is None:
            nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, nccl))
    return found


def _env(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


if __name__ == "__main__":
    main()

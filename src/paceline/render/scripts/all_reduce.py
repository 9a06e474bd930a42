"""All-reduce of growing sizes over all ranks: seconds, algorithm and bus bandwidth.

    torchrun --standalone --nproc-per-node=2 all_reduce.py --max-bytes 67108864 --json found.json

NCCL on GPUs, gloo on CPUs. Seconds are the slowest rank's mean. Bus bandwidth is what each rank's
link carries in one direction, to be held against its data sheet: bytes / seconds x 2 (n - 1) / n.
Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UPS = 3
ONE_SIZE_S = 0.5
"""About how long one size is measured, after the warm-up."""


def measure(num_bytes: int, device: torch.device) -> dict[str, Any]:
    """One size. Ends the program where the sum is wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wanted = world * (world + 1) / 2
    if not bool((values == wanted).all()):
        raise SystemExit(f"rank {rank}: the sum of {num_bytes} bytes is not {wanted}")
    values.zero_()
    once = timed(values, WARM_UPS)
    repeats = int(min(200, max(3, ONE_SIZE_S / max(once, 1e-9))))
    seconds = timed(values, repeats)
    rate = num_bytes / seconds
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "repeats": repeats,
        "algbw_bytes_per_s": rate,
        "busbw_bytes_per_s": rate * 2 * (world - 1) / world,
    }


def timed(values: torch.Tensor, repeats: int) -> float:
    """Mean seconds of one, on the slowest rank: the same number on all of them."""
    dist.barrier()
    wait(values.device)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    wait(values.device)
    mean = torch.tensor((time.perf_counter() - start) / repeats, device=values.device)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean)


def wait(device: torch.device) -> None:
    """Until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """One rank's part; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min-bytes", type=int, default=1024)
    parser.add_argument("--max-bytes", type=int, default=256 * 2**20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if torch.cuda.is_available():  # ROCm's too
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rows, num_bytes = [], max(4, asked.min_bytes // 4 * 4)
    says = dist.get_rank() == 0
    if says:
        print(f"# {dist.get_world_size()} ranks, {dist.get_backend()}, torch {torch.__version__}")
        print(f"# {'bytes':>12} {'seconds':>12} {'algbw GB/s':>12} {'busbw GB/s':>12}", flush=True)
    while num_bytes <= asked.max_bytes:
        row = measure(num_bytes, device)
        rows.append(row)
        if says:
            rates = row["algbw_bytes_per_s"] / 1e9, row["busbw_bytes_per_s"] / 1e9
            print(
                f"  {num_bytes:12d} {row['seconds']:12.6f} {rates[0]:12.3f} {rates[1]:12.3f}",
                flush=True,
            )
        num_bytes *= 4
    if says and asked.json is not None:
        found = {
            "world_size": dist.get_world_size(),
            "backend": dist.get_backend(),
            "device": str(torch.cuda.get_device_name()) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "rows": rows,
        }
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()

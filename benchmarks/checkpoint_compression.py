"""How much a trained state compresses without loss, and how fast.

    .venv/bin/python benchmarks/checkpoint_compression.py [steps] [repeats]

A decoder of 3 million parameters is trained for real on Python's standard library, in float32, and
its last checkpoint compressed: weights and moments as saved, the weights alone, and the weights
cast to bfloat16. `planes` is what copies use (record/planes.py); `plain` is zstandard at the same
level without taking numbers apart. Rates are of raw bytes on one core, in memory.
"""

import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zstandard
from figures import machine, spread
from training import run_job

from paceline.record.planes import LEVEL, compressed, decompressed, spans_of
from paceline.record.tensors import read_tensors
from paceline.runtime.checkpoint.state_files import StateFiles


def job_of(steps: int) -> dict[str, Any]:
    """Half an hour's training at most on two cores."""
    return {
        "name": "compression",
        "model": {"decoder": {"layers": 4, "hidden": 256, "heads": 4}},
        "data": {"corpus": "python-stdlib", "seq_len": 128},
        "cluster": {"accelerator": "cpu", "per_node": 1},
        "train": {"global_batch": 8, "steps": steps, "precision": "fp32", "learning_rate": 1e-3},
        "layout": {"data": 1},
        "checkpoint": {"every": steps},
    }


def main() -> None:
    """Print ratio and rates of each part."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    print(f"measured; {machine()}; zstandard {zstandard.__version__}, level {LEVEL}")
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", job_of(steps))
        path = run / "checkpoints" / f"step-{steps:08d}"
        shard = next(path.glob("*.distcp"))
        whole = shard.read_bytes()
        files = StateFiles(path)
        loss = (run / "metrics.jsonl").read_text().splitlines()
        print(f"after {steps} steps, last line: {loss[-1][:90]}")
        weights = [files.value(name) for name in files.names if name.startswith("model/")]
        moments = {
            key: [files.value(name) for name in files.names if name.endswith(f"/{key}")]
            for key in ("exp_avg", "exp_avg_sq")
        }
        show("the data file", whole, spans_of(shard.name, len(whole), read_tensors(path)), repeats)
        show("weights, float32", *bytes_of(weights), repeats)
        show("weights, bfloat16", *bytes_of([each.bfloat16() for each in weights]), repeats)
        for key, values in moments.items():
            show(f"{key}, float32", *bytes_of(values), repeats)


def bytes_of(tensors: list[torch.Tensor]) -> tuple[bytes, list[tuple[int, int]]]:
    """Values one after the other, as one span."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    content = flat.view(torch.uint8).numpy().tobytes()
    return content, [(len(content), flat.element_size())]


def show(name: str, content: bytes, spans: list[tuple[int, int]], repeats: int) -> None:
    """Ratio, rates, and that it comes back."""
    packed = b"".join(compressed(io.BytesIO(content), spans))
    assert b"".join(decompressed(io.BytesIO(packed))) == content, "it does not come back"
    packing, unpacking = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in compressed(io.BytesIO(content), spans):
            pass
        middle = time.perf_counter()
        for _ in decompressed(io.BytesIO(packed)):
            pass
        packing.append(len(content) / (middle - start) / 1e6)
        unpacking.append(len(content) / (time.perf_counter() - middle) / 1e6)
    plain = len(content) / len(zstandard.ZstdCompressor(level=LEVEL).compress(content))
    ratio = len(content) / len(packed)
    saved = 1 - 1 / ratio
    print(f"{name}: {len(content) / 1e6:.1f} MB, planes {ratio:.3f} x, plain {plain:.3f} x")
    print(f"  packing    {spread(packing, 'MB/s', 0)}")
    print(f"  unpacking  {spread(unpacking, 'MB/s', 0)}")
    # Packing and sending follow each other: 1/packing + 1/(ratio * link) < 1/link.
    print(f"  worth it on a link below {statistics.median(packing) * saved:.0f} MB/s")


if __name__ == "__main__":
    main()

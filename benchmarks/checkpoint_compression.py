"""How much a trained state compresses without loss, and how fast.

    .venv/bin/python benchmarks/checkpoint_compression.py [steps] [repeats]

A decoder of 1.9 million parameters is trained for real on Python's standard library, in float32 on
one thread; then its weights, the same cast to bfloat16, and Adam's moments are compressed. `planes`
is what copies use (record/byte_shuffle.py); `plain` is zstandard at the same level without taking
numbers apart. Rates are of raw bytes on one core, in memory.
"""

import io
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import zstandard
from figures import machine, spread

from paceline.profile import DecoderShape
from paceline.record.byte_shuffle import LEVEL, compressed, decompressed
from paceline.runtime.decoder import Decoder

SHAPE = DecoderShape(
    layers=4,
    hidden=192,
    heads=4,
    kv_heads=4,
    head_dim=48,
    ffn=512,
    vocab=256,
    tied_embeddings=False,
)
SEQ_LEN, BATCH = 64, 8


def trained(steps: int) -> tuple[Decoder, torch.optim.Optimizer, float]:
    """The model after so many steps, its optimizer, and the last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    text = b"".join(file.read_bytes() for file in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Decoder(SHAPE, SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    last = 0.0
    for _ in range(steps):
        starts = torch.randint(0, len(data) - SEQ_LEN - 1, (BATCH,))
        tokens = torch.stack([data[start : start + SEQ_LEN + 1] for start in starts])
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
    return model, optimizer, last


def main() -> None:
    """Print ratio and rates of each part."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"measured; {machine()}; zstandard {zstandard.__version__}, level {LEVEL}")
    model, optimizer, loss = trained(steps)
    print(f"after {steps} steps, loss {loss:.3f}")
    parameters = list(model.parameters())
    weights = [each.detach() for each in parameters]
    show("weights, float32", *bytes_of(weights), repeats)
    show("weights, bfloat16", *bytes_of([each.bfloat16() for each in weights]), repeats)
    for key in ("exp_avg", "exp_avg_sq"):
        show(f"{key}, float32", *bytes_of([optimizer.state[p][key] for p in parameters]), repeats)


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

"""Packed documents beside padded ones: how far apart the numbers are, and how much faster.

    .venv/bin/python benchmarks/packing.py [--pairs 30] [--median 90] [--spread 0.9]

Equality: losses and gradients of packed samples beside those of each document alone, through the
built-in decoder: the largest difference of a tensor over its largest number. In float64, and in
bf16 as a run computes it (autocast); beside the latter how far bf16 is from float64 unpacked.

Throughput: documents of log-normal lengths (median and sigma of the logarithm above), cut at 512.
Packed by best fit into samples of 512, padded to the longest of their batch, and padded to 512.
Targets that count per second of a forward and a backward pass, one thread, the three ways in turn;
a pair is two neighbouring measurements. About 8 minutes with 30 pairs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from figures import interval, machine, ratio_of_medians, spread
from torch import Tensor

from paceline.choices import Precision
from paceline.parallel.layout import Layout
from paceline.prepare.join import pack_documents
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.strategy.train import IGNORED, Batch

SEQ_LEN, BATCH, NUM_DOCUMENTS = 512, 8, 96
SHAPE = DecoderShape(
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    ffn=352,
    vocab=1024,
    tied_embeddings=True,
)


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--median", type=float, default=90.0, help="tokens of a document")
    parser.add_argument("--spread", type=float, default=0.9, help="sigma of the logarithm")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(machine(), flush=True)
    documents = draw_documents(asked.median, asked.spread)
    show_equality(documents[:48])
    show_throughput(documents, asked.pairs)
    dist.destroy_process_group()


def draw_documents(median: float, sigma: float) -> list[Tensor]:
    """Documents of random tokens, each with one more than its targets."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(median), sigma, NUM_DOCUMENTS), 2, SEQ_LEN).astype(int)
    return [torch.from_numpy(draw.integers(0, SHAPE.vocab, size + 1)) for size in lengths]


def batch_of(rows: list[list[Tensor]], seq_len: int) -> Batch:
    """Samples of several documents each, filled up with targets that do not count."""
    inputs_BS = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    targets_BS = torch.full_like(inputs_BS, IGNORED)
    ends: list[list[int]] = []
    for sample, documents in enumerate(rows):
        edges = [0, *np.cumsum([len(document) - 1 for document in documents]).tolist()]
        for document, (start, stop) in zip(documents, pairwise(edges), strict=True):
            inputs_BS[sample, start:stop] = document[:-1]
            targets_BS[sample, start:stop] = document[1:]
        ends.append([int(edge) for edge in edges[1:]])
    most = max(map(len, ends)) + 1
    ends_BE = torch.tensor([[*row, *[seq_len] * (most - len(row))] for row in ends])
    return inputs_BS, targets_BS, ends_BE.to(torch.int32)


def packed(documents: list[Tensor]) -> list[Batch]:
    """Batches of full samples, by best fit."""
    lengths = np.array([len(document) - 1 for document in documents])
    starts, order = pack_documents(lengths, SEQ_LEN)
    rows = [[documents[i] for i in order[a:b].tolist()] for a, b in pairwise(starts.tolist())]
    return [batch_of(rows[i : i + BATCH], SEQ_LEN) for i in range(0, len(rows), BATCH)]


def padded(documents: list[Tensor], seq_len: int | None) -> list[Batch]:
    """Batches of one document a sample, as long as the longest of them or as `seq_len`."""
    found = []
    for start in range(0, len(documents), BATCH):
        own = documents[start : start + BATCH]
        batch = batch_of([[each] for each in own], seq_len or max(len(each) - 1 for each in own))
        found.append(batch[:2])  # causal attention sees no padding behind a document
    return found


def gradients(batches: list[Batch], dtype: torch.dtype, precision: Precision) -> dict[str, Tensor]:
    """The mean loss and the gradients of all batches, as one step has them."""
    model, meshes = make_model(dtype)
    seen = run_batches(model, meshes, batches, precision)
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    num = float(seen.num_targets) / seen.expected_targets
    scaled = {name: gradient.double() / num for name, gradient in found.items()}
    return scaled | {"loss": seen.loss_sum / seen.num_targets}


def make_model(dtype: torch.dtype) -> tuple[torch.nn.Module, strategy.Meshes]:
    """The decoder on this one rank, the same weights each time."""
    torch.manual_seed(0)
    layout = Layout(data=1, sharding="none", micro_batch=BATCH, accumulation=1)
    meshes = strategy.make_meshes(layout, "cpu")
    whole = Decoder(SHAPE, SEQ_LEN).to(dtype)
    return strategy.apply(whole, layout, meshes, precision="fp32"), meshes


def run_batches(
    model: torch.nn.Module, meshes: strategy.Meshes, batches: list[Batch], precision: Precision
) -> strategy.Losses:
    """Forward and backward of batches of any size."""
    uneven = strategy.Uneven(num_micro_batches=len(batches), num_targets=1000.0)
    return strategy.forward_backward(model, meshes, batches, precision=precision, uneven=uneven)


def show_equality(documents: list[Tensor]) -> None:
    """Print the largest relative differences."""
    alone = [batch_of([[each]], len(each) - 1)[:2] for each in documents]
    together = packed(documents)
    want = gradients(alone, torch.float64, "fp32")
    wide = gradients(together, torch.float64, "fp32")
    narrow = gradients(together, torch.float32, "bf16")
    narrow_alone = gradients(alone, torch.float32, "bf16")
    print(f"{len(documents)} documents in {sum(len(each[0]) for each in together)} samples")
    print(f"float64, packed beside alone:         {deviation(wide, want):.1e}")
    print(f"bf16, packed beside alone in bf16:    {deviation(narrow, narrow_alone):.1e}")
    print(f"bf16, alone beside alone in float64:  {deviation(narrow_alone, want):.1e}")
    print(f"bf16, packed beside alone in float64: {deviation(narrow, want):.1e}", flush=True)


def deviation(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference of a tensor, over its largest number."""
    assert found.keys() == want.keys()
    each = (float((found[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)
    return max(each)


def show_throughput(documents: list[Tensor], num_pairs: int) -> None:
    """Print targets per second, and the ratios with their intervals."""
    ways: dict[str, list[Batch]] = {
        "packed": packed(documents),
        "padded to the longest of 8": padded(documents, None),
        f"padded to {SEQ_LEN}": padded(documents, SEQ_LEN),
    }
    model, meshes = make_model(torch.float32)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(num_pairs + 1):
        for name in rotated(list(ways), round_number):
            rate = measured(lambda name=name: run_batches(model, meshes, ways[name], "fp32"))
            model.zero_grad()
            if round_number:  # the first one warms up
                rates[name].append(rate)
    lengths = [len(each) - 1 for each in documents]
    print(
        f"{len(lengths)} documents of {min(lengths)} to {max(lengths)}, mean {np.mean(lengths):.0f}"
    )
    for name, batches in ways.items():
        places = sum(each[0].numel() for each in batches)
        fill = f"{1 - sum(lengths) / places:.1%} padding"
        print(f"{name:28} {fill:15} targets/s: {spread(rates[name], '/s', 0)}")
    for name in list(ways)[1:]:
        pairs = list(zip(rates["packed"], rates[name], strict=True))
        ratio, low, high = interval(pairs, ratio_of_medians)
        print(f"packed over {name}: {ratio:.2f} ({low:.2f} to {high:.2f}, 95 %), n = {len(pairs)}")


def rotated(names: list[str], by: int) -> Iterator[str]:
    """Another one first each time."""
    yield from names[by % len(names) :]
    yield from names[: by % len(names)]


def measured(run: Callable[[], strategy.Losses]) -> float:
    """Targets that count, per second."""
    started = time.perf_counter()
    losses = run()
    return float(losses.num_targets) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()

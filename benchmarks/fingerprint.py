"""Comparing replicas: what it costs, and whether every flipped bit is found and its rank named.

    .venv/bin/python benchmarks/fingerprint.py [--flips 200] [--clean 10000] [--steps 60]

Speed: fingerprints of AdamW's state in one thread, beside the weighted sums that accelerators use
and a copy. Step: two real ranks over gloo, the README's model, steps with a comparison and without
in turn. Detection: 2, 3 and 4 replicas of a small network in one process, each with its own
samples, so that a wrong parameter goes into all gradients as it would; in each trial one random bit
of one replica's parameters or moments is flipped, while nothing writes or in an update.
"""

import argparse
import copy
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from figures import machine, spread
from tests.ranks import run_ranks
from torch import Tensor, nn

from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime.decoder import Decoder
from paceline.runtime.recovery.fingerprint import fingerprint, sums_of_words
from paceline.runtime.recovery.guard import Guard, interval
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.repair import far_apart, unequal
from paceline.runtime.recovery.verdict import Verdict, farther

CPU = torch.device("cpu")

SHAPES = {
    "the README's model": (3, 128, 4, 8),
    "8 x 512": (8, 512, 8, 8),
    "12 x 768, 32,000 tokens": (12, 768, 12, 8),
}
"""Layers, hidden size, heads, samples."""

EVERY = (1, 5)


def decoder(layers: int, hidden: int, heads: int, vocab: int = 256) -> nn.Module:
    """A model as the built-in trainer makes it."""
    shape = DecoderShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=3 * hidden,
        vocab=vocab,
        tied_embeddings=True,
    )
    return Decoder(shape, 128)


def with_moments(model: nn.Module) -> LiveState:
    """Its state after one update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return LiveState(model, optimizer)


def timed(action: Callable[[], object], repeats: int = 15) -> list[float]:
    """Seconds of each call, the first left out."""
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def milliseconds(seconds: Sequence[float]) -> str:
    """Middle and spread."""
    return spread([1e3 * each for each in seconds], "ms", 2)


def print_speed() -> None:
    """Fingerprints by size of the state."""
    for name, (layers, hidden, heads, _) in SHAPES.items():
        vocab = 32_000 if "32,000" in name else 256
        state = with_moments(decoder(layers, hidden, heads, vocab))
        tensors = [tensor for _, tensor in state.tensors()]
        room = [torch.empty_like(tensor) for tensor in tensors]
        ways = {
            "xxh3": lambda state=state: int(fingerprint(state.tensors()).whole()),
            "sums": lambda tensors=tensors: [int(sums_of_words(each)) for each in tensors],
            "copy": lambda room=room, tensors=tensors: [
                a.copy_(b) for a, b in zip(room, tensors, strict=True)
            ],
        }
        print(f"{name}: {state.num_bytes / 1e6:.0f} MB in {len(tensors)} tensors")
        for way, action in ways.items():
            seconds = timed(action)
            rate = state.num_bytes / statistics.median(seconds) / 1e9
            print(f"  {way}: {milliseconds(seconds)}, {rate:.1f} GB/s")


def steps_with_and_without(rank: int, world: int, steps: int) -> dict[str, list[float]]:
    """Seconds of steps with a comparison and without, and of the comparison's own work."""
    torch.manual_seed(0)
    model = decoder(3, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    layout = Layout(data=world, sharding="none", micro_batch=8, accumulation=1)
    guard = Guard(layout, rank, LiveState(model, optimizer), CPU)
    guard.every = 2
    seconds: dict[str, list[float]] = {"with": [], "without": [], "check": []}
    for step in range(1, 2 * steps + 7):
        tokens = torch.randint(0, 256, (8, 129))
        dist.barrier()
        start = time.perf_counter()
        loss = F.cross_entropy(replica(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sums = torch.zeros(3 + 2 * world, dtype=torch.float64)
        is_due, own_s = guard.is_due(step - 1), 0.0
        if is_due:
            began = time.perf_counter()
            sums = torch.cat([sums, guard.ballot(step - 1)])
            own_s = time.perf_counter() - began
        dist.all_reduce(sums)
        if is_due:
            assert guard.verdict(step - 1, sums[3 + 2 * world :].tolist()) is None
        optimizer.step()
        optimizer.zero_grad()
        began = time.perf_counter()
        guard.after_update(step)
        # The update before a comparison is where two replicas' is taken a second time.
        after_s = time.perf_counter() - began
        end = time.perf_counter()
        if step > 6:
            seconds["with" if is_due else "without"].append(
                end - start - (after_s if not is_due else 0.0)
            )
            seconds["check"].append(own_s + after_s)
    return seconds


def print_step(steps: int) -> None:
    """The README's job."""
    results = run_ranks(steps_with_and_without, 2, steps, limit_s=600)
    both = results[0]
    pairs = zip(both["check"][::2], both["check"][1::2], strict=False)
    check_s = [a + b for a, b in pairs]
    plain = statistics.median(both["without"])
    print("two ranks over gloo, the README's model, a comparison at every other step:")
    print(f"  step without: {milliseconds(both['without'])}")
    print(f"  step with:    {milliseconds(both['with'])}")
    print(
        f"  of it the comparison (two fingerprints, as two replicas need): {milliseconds(check_s)}"
    )
    share, every = statistics.median(check_s) / plain, interval(statistics.median(check_s), plain)
    print(f"  {share:.2%} of a step when done at every one; `auto` does it every {every}")


class Ranks:
    """Replicas of a small network that are trained together."""

    def __init__(self, num: int, every: int) -> None:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.models = [copy.deepcopy(first) for _ in range(num)]
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in self.models
        ]
        both = zip(self.models, self.optimizers, strict=True)
        self.states = [LiveState(model, optimizer) for model, optimizer in both]
        layout = Layout(data=num, sharding="none", micro_batch=1, accumulation=1)
        self.guards = [Guard(layout, rank, s, CPU) for rank, s in enumerate(self.states)]
        for guard in self.guards:
            guard.every = every

    def step(self, number: int, in_update: Callable[[], None] = lambda: None) -> None:
        """One step: every replica's own samples, the mean of their gradients, the same update."""
        for rank, model in enumerate(self.models):
            draw = torch.Generator().manual_seed(number * 100 + rank)
            inputs = torch.randn(8, 16, generator=draw)
            F.mse_loss(model(inputs), inputs.roll(1, 1)).backward()
        means = [
            torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameters in zip(*(model.parameters() for model in self.models), strict=True)
        ]
        is_finite = all(bool(mean.isfinite().all()) for mean in means)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean.clone()
            if is_finite:  # as the vote of all ranks would have it
                optimizer.step()
            optimizer.zero_grad()
        in_update()
        for guard in self.guards:
            guard.after_update(number)

    def check(self, number: int) -> Verdict | None:
        """The verdict that all ranks come to."""
        total = torch.stack([guard.ballot(number) for guard in self.guards]).sum(0).tolist()
        verdicts = [guard.verdict(number, total) for guard in self.guards]
        assert all(verdict == verdicts[0] for verdict in verdicts)
        return verdicts[0]

    def save(self) -> list[list[Tensor]]:
        """A copy of all."""
        return [[tensor.clone() for _, tensor in state.tensors()] for state in self.states]

    def load(self, saved: list[list[Tensor]]) -> None:
        """Back to a copy."""
        for state, tensors in zip(self.states, saved, strict=True):
            for (_, tensor), before in zip(state.tensors(), tensors, strict=True):
                tensor.copy_(before)


def flip(tensor: Tensor, bit: int) -> None:
    """One bit of its memory."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8


def far_from(
    right: list[list[Tensor]], wrong: list[list[Tensor]], rank: int
) -> tuple[float, float]:
    """How far a replica's numbers were from the right ones, in tensors of which replicas differed:
    where they did, and elsewhere."""
    there = elsewhere = 0.0
    for index, mine in enumerate(wrong[rank]):
        others = [wrong[other][index].reshape(-1) for other in range(len(wrong))]
        first = others[0].view(torch.uint8)
        size = mine.element_size()
        places = [unequal(first, other.view(torch.uint8), size) for other in others[1:]]
        where = torch.cat(places).unique()
        if where.numel():
            pair = far_apart(mine.reshape(-1), right[rank][index].reshape(-1), where)
            there, elsewhere = max(there, pair[0]), max(elsewhere, pair[1])
    return there, elsewhere


def trial(ranks: Ranks, every: int, start: int, draw: random.Random) -> tuple[str, str]:
    """One flip between two comparisons: what was found, and how."""
    saved = ranks.save()
    rank = draw.randrange(len(ranks.models))
    at_rest = draw.random() < 0.5
    number = start + 1 + draw.randrange(every)
    end = start + every
    tensors = list(ranks.states[rank].tensors())
    tensor = draw.choice([tensor for _, tensor in tensors if tensor.numel() > 1])
    bit = draw.randrange(tensor.nbytes * 8)
    for step in range(start + 1, end + 1):
        is_now = step == number
        ranks.step(step, (lambda: flip(tensor, bit)) if is_now and not at_rest else lambda: None)
        if is_now and at_rest:
            flip(tensor, bit)
    kind = "while nothing writes" if at_rest else "in an update"
    found = ranks.check(end)
    wrong = ranks.save()
    ranks.load(saved)
    for step in range(start + 1, end + 1):
        ranks.step(step)
    assert ranks.check(end) is None, "what is computed again is right"
    right = ranks.save()
    if found is None:
        is_gone = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(wrong[rank], right[rank], strict=True)
            if a.dim()
        )
        return kind, "gone again before the comparison" if is_gone else "gone, but left a trace"
    if found.odd == (rank,):
        return kind, "named at once"
    if found.undecided:
        far = {one: far_from(right, wrong, one) for one in found.suspects}
        noise = max(other for _, other in far.values())
        told = farther({one: there for one, (there, _) in far.items()}, noise)
        return kind, "named by the replay" if told == (rank,) else (
            "found, not named" if not told else "WRONG RANK NAMED"
        )
    return kind, "WRONG RANK NAMED"


def print_detection(flips: int) -> None:
    """Random flips, by replicas and interval."""
    for num in (2, 3, 4):
        for every in EVERY:
            ranks, draw = Ranks(num, every), random.Random(num * 10 + every)
            ranks.step(0)
            ranks.check(0)
            counts: Counter[tuple[str, str]] = Counter()
            for index in range(flips):
                counts[trial(ranks, every, index * every, draw)] += 1
            told = "; ".join(f"{a}, {b}: {n}" for (a, b), n in sorted(counts.items()))
            print(f"{num} replicas, every {every}: {flips} flips: {told}", flush=True)


def print_clean(checks: int) -> None:
    """Comparisons of runs that are left alone."""
    alarms = 0
    for num in (2, 3, 4):
        ranks = Ranks(num, 1)
        for step in range(checks // 3 + 1):
            ranks.step(step)
            alarms += ranks.check(step) is not None
    print(f"{3 * (checks // 3 + 1)} comparisons without a flip: {alarms} alarms")


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=200, help="for each cell of six")
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=60)
    parts = ("speed", "step", "flips", "clean")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"measured; {machine()}; one thread")
    if "speed" in options.parts:
        print_speed()
    if "step" in options.parts:
        print_step(options.steps)
    if "flips" in options.parts:
        print_detection(options.flips)
    if "clean" in options.parts:
        print_clean(options.clean)


if __name__ == "__main__":
    main()

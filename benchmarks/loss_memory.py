"""A head and its loss: memory and processor time of chunks, all logits, and torch's own chunks.

    .venv/bin/python benchmarks/loss_memory.py
    .venv/bin/python benchmarks/loss_memory.py --tokens 8192 --rounds 9

Each way runs in a process of its own, on one core, forward and backward; in every round all ways,
in an order that turns. Memory is what the process grew by at its fullest. `off` is the loss's
relative difference from float64's. The last lines of each type compare chunks with all logits,
round by round: peak at most 0.3 and time at most 1.2 are the aims.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from figures import interval, machine, ratio_of_medians, spread

ROOT = Path(__file__).parents[1]
KINDS = ("all logits", "chunks", "torch 256", "torch auto")
TYPES = ("float32", "bfloat16")


def main() -> None:
    options = _parse()
    if options.kind is not None:
        print(json.dumps(_measure(options)))
        return
    print(machine())
    print(
        f"{options.tokens} x {options.hidden} -> {options.vocab}, chunks of {options.chunk} tokens"
    )
    for dtype in TYPES:
        seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds):
            turned = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
            for kind in turned:
                seen[kind].append(_in_own_process(kind, dtype))
        exact = _in_own_process("all logits", "float64")["loss"]
        for kind, rounds in seen.items():
            off = abs(rounds[0]["loss"] - exact) / exact
            peaks = spread([each["mib"] for each in rounds], "MiB", 0)
            times = spread([each["seconds"] for each in rounds], "s", 2)
            print(f"{dtype:8} {kind:10} off {off:.0e}  {peaks}  {times}", flush=True)
        for name in ("mib", "seconds"):
            pairs = [
                (ours[name], theirs[name])
                for ours, theirs in zip(seen["chunks"], seen["all logits"], strict=True)
            ]
            ratio, low, high = interval(pairs, ratio_of_medians)
            print(f"{dtype:8} {name} of chunks / all logits: {ratio:.3f} ({low:.3f} to {high:.3f})")


def _in_own_process(kind: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator)
    weight = torch.randn(options.vocab, options.hidden, generator=generator) * 0.05
    hidden, weight = (each.to(dtype).requires_grad_() for each in (hidden, weight))
    targets = torch.randint(0, options.vocab, (options.tokens,), generator=generator)
    targets[::7] = -100
    _loss(options, hidden[:8], weight[:8], targets[:8] % 8).backward()  # imports and libraries
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before = _peak_kib()
    start = time.process_time()
    loss = _loss(options, hidden, weight, targets)
    (loss / options.tokens).backward()
    return {
        "loss": loss.item(),
        "seconds": time.process_time() - start,
        "mib": (_peak_kib() - before) / 1024,
    }


def _peak_kib() -> int:
    """Most memory of this process so far, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _loss(options: argparse.Namespace, hidden, weight, targets):  # type: ignore[no-untyped-def]
    import torch
    import torch.nn.functional as F

    from paceline.runtime.strategy.chunked import chunked_loss

    if options.kind == "chunks":
        return chunked_loss(hidden, weight, targets, options.chunk)
    if options.kind == "all logits":
        logits = hidden @ weight.T
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, reduction="sum")
    chosen = torch.nn.LinearCrossEntropyOptions()
    if options.kind == "torch 256":
        chosen = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, acc_policy="balanced")
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=chosen)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

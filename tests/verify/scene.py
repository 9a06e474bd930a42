"""A small decoder, cases of it in any layout, and verifications of them on real ranks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.ranks import run_ranks

from paceline.check.verify.judge import Verdict, judge
from paceline.check.verify.line import Line
from paceline.check.verify.runs import runs_of
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.record.verification import Case, Facts

SHAPE = DecoderShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=64,
    tied_embeddings=False,
)
JOB = """
model: {decoder: {layers: 2, hidden: 32, heads: 4}}
data: {corpus: python-stdlib, seq_len: 16}
train: {global_batch: 8, steps: 100, learning_rate: 0.003, clip_norm: 0.5, seed: 3}
"""


def layout_of(**changes: Any) -> Layout:
    """Two data ranks, two micro-batches of two samples each, unless told otherwise."""
    return Layout(**{"data": 2, "sharding": "none", "micro_batch": 2, "accumulation": 2} | changes)


def case_of(layout: Layout, *, only: Sequence[str] = (), **changes: Any) -> Case:
    """The small decoder in a layout, with every run that belongs to it, or only some."""
    precision, steps = changes.pop("precision", "fp32"), changes.pop("steps", 4)
    runs = [run for run in runs_of(layout, precision, steps) if not only or run.name in only]
    fields: dict[str, Any] = {
        "job": JOB,
        "folder": "/",
        "source": "job.yaml",
        "decoder": SHAPE,
        "config": None,
        "dropout": {},
        "layout": layout,
        "precision": precision,
        "vocab": 64,
        "seq_len": 16,
        "steps": steps,
        "device": "cpu",
        "threads": 1,
        "num_samples": 37,
        "runs": tuple(runs),
    }
    return Case(**fields | changes)


def verify_all(asked: Sequence[tuple[Case, str | None]], folder: Path) -> list[Facts]:
    """The facts of some cases of as many ranks, each with a fault or without, one after the other
    on the same processes.

    Args:
        asked: Cases, each with the name of a class in `planted.py` or None.
        folder: An empty one.
    """
    world = asked[0][0].layout.num_ranks
    by_rank = run_ranks(rank_program, world, list(asked), folder)
    found = []
    for (case, _), results in zip(asked, zip(*by_rank, strict=True), strict=True):
        (reference,) = [each for _, each in results if each is not None]
        ranks = tuple(rank for rank, _ in results)
        found.append(Facts(case=case, reference=reference, ranks=ranks))
    return found


def rank_program(
    rank: int, world: int, asked: Sequence[tuple[Case, str | None]], folder: Path
) -> list[Any]:
    """What each rank does."""
    from tests.verify import planted

    from paceline.runtime.verify.program import verify_rank

    torch.use_deterministic_algorithms(True)
    results = []
    for index, (case, name) in enumerate(asked):
        own = folder / str(index)
        own.mkdir(exist_ok=True)
        with planted.planting(name):
            results.append(verify_rank(case, own, torch.device("cpu")))
    return results


def line_of(found: Facts | Verdict, name: str) -> Line:
    """The line of that name."""
    verdict = judge(found) if isinstance(found, Facts) else found
    (line,) = [line for line in verdict.lines if line.name == name]
    return line


def with_rank(facts: Facts, rank: int, **changes: Any) -> Facts:
    """The same facts with one rank's changed."""
    ranks = list(facts.ranks)
    ranks[rank] = dataclasses.replace(ranks[rank], **changes)
    return dataclasses.replace(facts, ranks=tuple(ranks))


def with_step(facts: Facts, rank: int, run: str, index: int, **changes: Any) -> Facts:
    """The same facts with one step of one run of one rank changed."""
    before = facts.ranks[rank].runs[run]
    steps = list(before.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    after = dataclasses.replace(before, steps=tuple(steps))
    return with_rank(facts, rank, runs=facts.ranks[rank].runs | {run: after})

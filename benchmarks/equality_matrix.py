"""Every way to split a model, run on 4 real ranks against one, and how far they end apart.

    .venv/bin/python benchmarks/equality_matrix.py
    .venv/bin/python benchmarks/equality_matrix.py --models gpt2 llama --layouts "TP 4" "CP ring"
    .venv/bin/python benchmarks/equality_matrix.py --variants resume --json cells.json

Each cell trains a small model for 3 steps of SGD with momentum and clipping, a third of the targets
missing, in float64 and again in float32, over gloo. Its first number is the largest relative
difference of any loss, gradient norm or parameter in float64 (norms and routers that transformers
computes in float32 included), its second that of the losses in float32. `refused` cells were tried
too: the text is what the strategy said.

plain        as many samples at once as the layout takes
accumulation one sample at a time
recompute    every block computed again
resume       a checkpoint after step 2, loaded into a fresh model, then step 3

The scene is tests/runtime/equality.py, which the test suite shares.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from figures import machine  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.runtime.equality import (  # noqa: E402
    EXPERT_LAYOUTS,
    LAYOUTS,
    MODELS,
    alone_layout,
    deviation,
    layout_of,
    loss_deviation,
    train,
)

from paceline.errors import PacelineError  # noqa: E402

EVERY_LAYOUT = {**LAYOUTS, **EXPERT_LAYOUTS}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "accumulation": {"micro_batch": 1},
    "recompute": {"recompute": "full"},
    "resume": {},
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
WORLD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model in one layout and variant."""

    model: str
    layout: str
    variant: str
    wide: float | None = None
    """Largest relative difference in float64."""

    narrow: float | None = None
    """The same of the losses, in float32."""

    refused: str | None = None
    """What the strategy said."""

    failed: str | None = None
    """What went wrong otherwise."""

    @property
    def text(self) -> str:
        """For the table."""
        if self.refused is not None:
            return "refused"
        if self.failed is not None:
            return "FAILED"
        return f"{self.wide:.0e} / {self.narrow:.0e}"


def train_variants(
    rank: int, world: int, model: str, layout: str, variants: Sequence[str], folder: str
) -> dict[str, Any]:
    """On each rank: variant -> results by type, or the problem's text."""
    found: dict[str, Any] = {}
    for variant in variants:
        fields = layout_of(EVERY_LAYOUT[layout], dict(VARIANTS[variant]))
        try:
            found[variant] = {
                name: train(
                    fields,
                    model,
                    dtype,
                    resume_in=Path(folder) / variant / name if variant == "resume" else None,
                )
                for name, dtype in DTYPES.items()
            }
        except PacelineError as error:
            problem = error.problems[0]
            found[variant] = f"{problem.code}: {problem.what}"
    return found


def train_alone(rank: int, world: int, model: str) -> dict[str, Any]:
    """Results by type on one rank."""
    return {name: train(alone_layout(), model, dtype) for name, dtype in DTYPES.items()}


def cells_of(
    model: str, layout: str, variants: Sequence[str], alone: dict[str, Any], limit_s: float
) -> Iterator[Cell]:
    """The cells of one model in one layout; one that fails does not take the others with it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(
                train_variants, WORLD, model, layout, variants, folder, limit_s=limit_s
            )
        except AssertionError as error:
            if len(variants) > 1:
                for variant in variants:
                    yield from cells_of(model, layout, [variant], alone, limit_s)
                return
            yield Cell(model=model, layout=layout, variant=variants[0], failed=_reason(str(error)))
            return
    for variant in variants:
        yield _cell(model, layout, variant, [rank[variant] for rank in ranks], alone)


def _cell(model: str, layout: str, variant: str, seen: list[Any], alone: dict[str, Any]) -> Cell:
    place = {"model": model, "layout": layout, "variant": variant}
    said = [each for each in seen if isinstance(each, str)]
    if said:
        return Cell(**place, refused=said[0])
    try:
        wide = deviation([each["float64"] for each in seen], alone["float64"])
    except (AssertionError, ValueError) as error:
        return Cell(**place, failed=str(error)[:300])
    narrow = loss_deviation([each["float32"] for each in seen], alone["float32"])
    return Cell(**place, wide=wide, narrow=narrow)


def _reason(text: str) -> str:
    """The last line of the first rank that did not just lose another one."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "timed out" in line]
    own = [line for line in lines if "Connection" not in line and "peer" not in line]
    return (own or lines or text.splitlines()[-1:] or ["no words"])[0][:300]


def table(model: str, variants: Sequence[str], cells: Sequence[Cell]) -> Iterator[str]:
    """One model's cells as Markdown."""
    yield f"\n### {model}\n"
    yield f"| layout | {' | '.join(variants)} |"
    yield f"| --- |{' --- |' * len(variants)}"
    for layout in dict.fromkeys(cell.layout for cell in cells):
        texts = {cell.variant: cell.text for cell in cells if cell.layout == layout}
        yield f"| {layout} | {' | '.join(texts[variant] for variant in variants)} |"
    said: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if (why := cell.refused or cell.failed) is not None:
            said.setdefault(why, {}).setdefault(cell.layout, []).append(cell.variant)
    for why, where in said.items():
        places = [
            layout if len(found) == len(variants) else f"{layout} ({', '.join(found)})"
            for layout, found in where.items()
        ]
        yield f"\n- {', '.join(places)}: {why}"


def main() -> None:
    """Run the cells that are asked for, print a table for each model, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--layouts", nargs="+", choices=EVERY_LAYOUT, default=list(EVERY_LAYOUT))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one layout")
    parser.add_argument("--json", type=Path, help="also write every cell into this file")
    options = parser.parse_args()
    started = time.monotonic()
    print(f"measured; {machine()}, transformers {version('transformers')}; gloo, {WORLD} ranks")
    print("largest relative difference in float64 / of the losses in float32, 3 steps, n = 1 each")
    every: list[Cell] = []
    for model in options.models:
        alone = run_ranks(train_alone, 1, model, limit_s=options.limit)[0]
        cells: list[Cell] = []
        for layout in options.layouts:
            found = list(cells_of(model, layout, options.variants, alone, options.limit))
            cells += found
            texts = ", ".join(f"{cell.variant} {cell.text}" for cell in found)
            print(f"{model}, {layout}: {texts}", file=sys.stderr, flush=True)
        print("\n".join(table(model, options.variants, cells)), flush=True)
        every += cells
    ran = [cell for cell in every if cell.wide is not None]
    refused, failed = (
        [cell for cell in every if getattr(cell, name) is not None]
        for name in ("refused", "failed")
    )
    print(
        f"\n{len(every)} cells: {len(ran)} ran, {len(refused)} refused, {len(failed)} failed; "
        f"largest difference in float64 {max((cell.wide or 0 for cell in ran), default=0):.1e}, "
        f"of losses in float32 {max((cell.narrow or 0 for cell in ran), default=0):.1e}; "
        f"{time.monotonic() - started:.0f} s"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in every], indent=1))


if __name__ == "__main__":
    main()

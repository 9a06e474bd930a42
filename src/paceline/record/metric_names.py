"""One table of metric names: what curves, alerts, sinks and comparisons call each number of a run.

A name is `<area>/<what>_<unit>`, lower case, in plain SI. The numbers themselves are in the run's
files, under shorter names; `numbers_of` and `numbers_of_evaluation` translate a line of those.
docs/reference/metrics.md has this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.catalog.load import read_rows
from paceline.record.events import Evaluated
from paceline.record.metrics import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str = ""
    """Shown with a number: `s`, `bytes`, `tokens/s`; empty where it has none."""

    text: str
    """What it is, in one sentence."""

    field: str | None = None
    """Field of a line of `metrics.jsonl`; None where it comes from somewhere else."""


METRICS: Mapping[str, Metric] = read_rows("metrics.toml", Metric)
"""Name -> its row, in the order in which they are shown."""

FIELDS: Mapping[str, str] = {
    row.field: row.name for row in METRICS.values() if row.field is not None
}
"""Field of a line of `metrics.jsonl` -> name."""

_OTHER_WORDS = {
    "Loss/train": "train/loss",
    "Loss/val": "eval/loss",
    "val/loss": "eval/loss",
    "val_loss": "eval/loss",
    "held_out_loss": "eval/loss",
}
"""What other tools and earlier versions call them."""


def find_metric(word: str) -> Metric | None:
    """The row that a word means: a full name, a field, or a name with `_` for `/`.

    >>> find_metric("eval_loss").name, find_metric("tokens_per_s").name
    ('eval/loss', 'speed/tokens_per_s')
    """
    name = _OTHER_WORDS.get(word) or FIELDS.get(word) or word
    return METRICS.get(name) or METRICS.get(name.replace("_", "/", 1))


def numbers_of(line: StepMetrics | Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a step by name, in the table's order; then what the program logged, as it is.

    Args:
        line: A line of `metrics.jsonl`, read as a record or as plain JSON. Fields that it lacks
            are left out.

    Returns:
        None is what was not measured; of losses, norms and logged numbers, what was not finite.
        What your own script did not print is left out.
    """
    if isinstance(line, StepMetrics):
        ours = {
            name: getattr(line, field)
            for field, name in FIELDS.items()
            if line.not_finite is None
            or getattr(line, field) is not None
            or field in line.not_finite
        }
        return ours | line.logged
    ours = {name: line[field] for field, name in FIELDS.items() if field in line}
    return ours | dict(line.get("logged") or {})


def numbers_of_evaluation(event: Evaluated) -> dict[str, float | None]:
    """The numbers of an evaluation by name, each source's after the mean of all."""
    numbers = {"eval/loss": event.loss}
    if event.accuracy is not None:
        numbers["eval/accuracy"] = event.accuracy
    return numbers | {f"eval/loss/{name}": loss for name, loss in event.by_source.items()}

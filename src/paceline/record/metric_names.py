"""One table of metric names: what curves, alerts, sinks and comparisons call each number of a run.

A name is `<area>/<what>_<unit>`, lower case, in plain SI. The numbers themselves are in the run's
files, under shorter names; `numbers_of` and `numbers_of_evaluation` translate a line of those.
docs/reference/metrics.md has this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.record.events import Evaluated
from paceline.record.metrics import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    """Shown with a number: `s`, `bytes`, `tokens/s`; empty where it has none."""

    text: str
    """What it is, in one sentence."""

    field: str | None = None
    """Field of a line of `metrics.jsonl`; None where it comes from somewhere else."""


def _step(name: str, field: str, unit: str, text: str) -> Metric:
    return Metric(name=name, field=field, unit=unit, text=text)


def _other(name: str, unit: str, text: str) -> Metric:
    return Metric(name=name, unit=unit, text=text)


_ROWS = (
    _step("train/loss", "loss", "", "Mean loss over the global batch."),
    _step("train/accuracy", "accuracy", "share", "Right answers in the step, where it has any."),
    _step("train/grad_norm", "grad_norm", "", "Global norm of the gradient before clipping."),
    _step("train/learning_rate", "learning_rate", "", "Learning rate of the step."),
    _step("train/loss_scale", "loss_scale", "", "fp16's factor on the loss of the next step."),
    _other("eval/loss", "", "Mean evaluation loss; with several sources also `eval/loss/SOURCE`."),
    _other("eval/accuracy", "share", "Right answers in the evaluation, where it has any."),
    _step("speed/tokens_per_s", "tokens_per_s", "tokens/s", "Tokens of all ranks in a second."),
    _step("speed/step_s", "step_s", "s", "The whole step without save and evaluation."),
    _step("speed/mfu", "mfu", "share", "Useful FLOPs over the peak of all ranks."),
    _step("time/data_s", "data_s", "s", "Waiting for the samples."),
    _step("time/forward_s", "forward_s", "s", "Forward pass, on rank 0."),
    _step("time/backward_s", "backward_s", "s", "Backward pass with the gradient reduction."),
    _step("time/vote_s", "vote_s", "s", "Gradient norm and the vote of all ranks."),
    _step("time/apply_s", "apply_s", "s", "Clipping and optimizer."),
    _step("memory/peak_bytes", "memory_bytes", "bytes", "Highest memory of rank 0 so far."),
    _step("memory/reserved_bytes", "reserved_bytes", "bytes", "Most that its allocator has held."),
    _other("gpu/utilization", "share", "Time in which the GPU had work, from 0 to 1."),
    _other("gpu/memory_bytes", "bytes", "Memory in use on the GPU, of all processes."),
    _other("gpu/temperature_c", "°C", "Temperature of the GPU."),
    _other("gpu/power_w", "W", "Power that the GPU draws."),
    _other("gpu/power_share", "share", "That power over the GPU's limit."),
    _other("gpu/clock_hz", "Hz", "Clock of the GPU's multiprocessors."),
    _other("host/cpu_utilization", "share", "Processor time in use on the machine, from 0 to 1."),
    _other("host/memory_bytes", "bytes", "Memory in use on the machine."),
    _other("host/disk_free_bytes", "bytes", "Room left on the disk of the run's folder."),
    _other("host/received_bytes_per_s", "bytes/s", "Received over the network, without RDMA."),
    _other("host/sent_bytes_per_s", "bytes/s", "Sent over the network, without RDMA."),
    _other("run/step", "", "Newest finished step."),
    _other("run/silence_s", "s", "Since the newest step, save or evaluation."),
    _other("run/checkpoint_age_s", "s", "Since the newest checkpoint, or since training began."),
    _other("run/restarts", "", "Generations after the first, since the run was started."),
    _other("run/usd", "USD", "Cost so far, at the plan's price."),
    _other("run/usd_per_h", "USD/h", "Price of an hour of the run's machines."),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ROWS}
"""Name -> its row, in the order in which they are shown."""

FIELDS: Mapping[str, str] = {row.field: row.name for row in _ROWS if row.field is not None}
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

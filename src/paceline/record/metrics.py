"""Numbers of every step: one JSON line a step, in `metrics.jsonl`.

For your own script the controller writes what it has printed, or given to `paceline.log`. In other
runs rank 0 writes, before the step is saved or evaluated, so that no saved step is without its
line; how long those took is in the events. After a recovery some steps are repeated; their lines
stand again with a higher generation, and `read_metrics` keeps the newest of each step.
docs/reference/metrics.md is generated from the texts below.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from paceline.record.lines import LineFile, decoded, read_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """From 1."""

    generation: int
    """How many times the workers had been started, from 1."""

    at: float
    """When it was finished, in seconds since 1970 (UTC)."""

    loss: float | None = None
    """Mean loss over the global batch; None when it is not finite."""

    grad_norm: float | None = None
    """Global norm of the gradient before clipping; None when it is not finite."""

    learning_rate: float | None = None

    loss_scale: float | None = None
    """fp16 only: what the next step's loss is multiplied by. Halved by each step whose gradients
    overflow; None with other precisions."""

    tokens_per_s: float | None = None
    """Over all ranks, in this step, save and evaluation left out. For your own program that
    does not count tokens, samples per second."""

    step_s: float | None = None
    """The whole step without save and evaluation; the parts follow."""

    forward_s: float | None = None
    """Forward pass, on rank 0; of a program that goes through `step.micro_batches` itself, with its
    data. On an accelerator this and the other parts are from events in its stream, not from the
    host's clock; None is what was not measured."""

    backward_s: float | None = None
    """Backward pass with the gradient reduction."""

    vote_s: float | None = None
    """Gradient norm, and the vote of all ranks (includes waiting for the slowest)."""

    apply_s: float | None = None
    """Clipping and optimizer; on an accelerator of the step before, as this step's update is still
    ahead when the line is written."""

    memory_bytes: int | None = None
    """Highest memory of rank 0 so far: resident on a CPU, allocated on an accelerator; None where
    the device does not count it."""

    applied: bool = True
    """False when the step was refused."""

    samples_digest: str = ""
    """xxh3 of the ids of every sample of the global batch, in order; empty for a step that was
    left out, whose samples were not read, and for a stream's, which have no ids."""

    data_s: float | None = None
    """Waiting for the samples, and their way to the accelerator, beside which they are read ahead;
    None where the program reads them itself, in its forward part."""

    reserved_bytes: int | None = None
    """The most that the accelerator's allocator has held for rank 0, with what it keeps for later
    tensors: far more than `memory_bytes` is memory in pieces. None on a CPU, and where the device
    does not count it."""

    mfu: float | None = None
    """Share of the ranks' peak that the step's useful FLOPs used, counted as the plan counts them;
    None where the plan knows no peak or no FLOPs."""

    accuracy: float | None = None
    """With `dpo`, share of the pairs whose chosen answer the model prefers, compared with what it
    did before the run; with `classification`, of the texts whose label is the likeliest; else
    None."""

    state_digest: str | None = None
    """SHA-256 of parameters and optimizer state after the step, where `drill.digest_every` asks for
    it and no recovery came between."""

    logged: dict[str, float | None] = field(default_factory=dict)
    """What the program gave to `session.log` in this step, on rank 0, by name; None when it is not
    finite. For your own script, other numbers that it printed or gave to `paceline.log`."""

    num_steps: int | None = None
    """Your own script only: steps of the whole run, as far as it has shown them."""

    not_finite: list[str] | None = None
    """Your own script only: fields that were nan or infinite; its other fields that are None were
    not printed. None for Paceline's own runtime, which measures every step."""


decode_step = msgspec.json.Decoder(StepMetrics).decode


def most_bytes(sizes: Iterable[int | None]) -> int | None:
    """The largest of what was measured; None where nothing was."""
    return max((size for size in sizes if size is not None), default=None)


class MetricsLog:
    """The writer of a run's `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; of a script, only what is known."""
        if metrics.not_finite is None:
            self._file.write(msgspec.json.encode(metrics))
            return
        known = {k: v for k, v in asdict(metrics).items() if v is not None and v not in ("", {})}
        self._file.write(msgspec.json.encode(known | dict.fromkeys(metrics.not_finite)))

    def write_missing(self, metrics: StepMetrics) -> None:
        """Append a step unless it is among the newest in the file: who should have written it may
        have died before that."""
        newest = read_tail(self._path) if self._path.exists() else b""
        if metrics.step not in {line.step for line in decoded(newest, decode_step)}:
            self.write(metrics)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The newest line of every step, in step order; torn lines are left out."""
    return sorted(
        {metrics.step: metrics for metrics in read_all_metrics(path)}.values(),
        key=lambda metrics: metrics.step,
    )


def read_all_metrics(path: Path) -> list[StepMetrics]:
    """Every whole line, also of steps that were repeated, in the order written."""
    return list(decoded(path.read_bytes(), decode_step)) if path.exists() else []

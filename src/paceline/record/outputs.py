"""What a trained model wrote and how it did at tasks: `outputs.json` in the run's folder."""

from pathlib import Path

import msgspec

from paceline.record.lines import write_whole
from paceline.units import counted

NAME = "outputs.json"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what the model wrote after it, always taking the likeliest token."""

    prompt: str
    text: str
    is_cut: bool
    """Whether it would have gone on: `evaluate.prompt_tokens` were written."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a task of `evaluate.tasks`."""

    task: str
    metric: str
    """As the harness names it, with its filter of answers where it has one."""

    value: float | None
    """None where it is no finite number, or the harness does not know the metric."""

    error: float | None
    """Standard error; None where the harness gives none."""

    num_samples: int

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:.4g}"
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.task} {self.metric} {value}{error} ({counted(self.num_samples, 'sample')})"


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, of one checkpoint."""

    step: int
    """The checkpoint's."""

    generations: tuple[Generation, ...] = ()
    scores: tuple[Score, ...] = ()
    problem: str | None = None
    """Why something is missing."""


def write_outputs(run: Path, outputs: Outputs) -> None:
    """Put it into a run's folder, in place of what was there."""
    write_whole(run / NAME, msgspec.json.format(msgspec.json.encode(outputs), indent=1) + b"\n")


def read_outputs(run: Path) -> Outputs | None:
    """That of a run's folder; None where there is none that can be read."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Outputs)
    except (OSError, msgspec.MsgspecError):
        return None

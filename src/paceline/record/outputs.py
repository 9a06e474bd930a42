"""What a trained model wrote and how it did at tasks: `outputs.json` in the run's folder."""

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.record.lines import read_json, write_json
from paceline.units import counted

NAME = "outputs.json"

_T = TypeVar("_T")


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
    """All of it, of one checkpoint, and of those that were chosen besides."""

    step: int
    generations: tuple[Generation, ...] = ()
    scores: tuple[Score, ...] = ()
    problem: str | None = None
    chosen: tuple["Outputs", ...] = ()
    """Outputs at the other steps that `evaluate.outputs_every` chose, ascending."""

    last_step: int = 0
    """The run's, when all of this was made."""

    @property
    def by_step(self) -> tuple["Outputs", ...]:
        """Outputs of each checkpoint, ascending by step."""
        return tuple(sorted((self, *self.chosen), key=lambda each: each.step))

    @property
    def all_scores(self) -> list[tuple[int, Score]]:
        """Each score with its step: a metric's together, ascending."""
        found = ((each.step, score) for each in self.by_step for score in each.scores)
        return _together(found, lambda score: (score.task, score.metric))

    @property
    def all_generations(self) -> list[tuple[int, Generation]]:
        """Each continuation with its step: a prompt's together, ascending."""
        found = ((each.step, made) for each in self.by_step for made in each.generations)
        return _together(found, lambda made: made.prompt)


def _together(
    found: Iterable[tuple[int, _T]], name: Callable[[_T], Hashable]
) -> list[tuple[int, _T]]:
    groups: dict[Hashable, list[tuple[int, _T]]] = {}
    for step, each in found:
        groups.setdefault(name(each), []).append((step, each))
    return [pair for group in groups.values() for pair in group]


def write_outputs(run: Path, outputs: Outputs) -> None:
    """Put it into a run's folder, in place of what was there."""
    write_json(run / NAME, outputs)


def read_outputs(run: Path) -> Outputs | None:
    """Outputs of a run's folder; None where there are none that can be read."""
    return read_json(run / NAME, Outputs)

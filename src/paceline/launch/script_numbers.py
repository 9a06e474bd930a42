"""Steps, losses and checkpoints of a script, from what its ranks print: the run's own records.

Pure: output in, lines of `metrics.jsonl` and events out. Numbers are read from rank 0, or where it
prints none, from the first rank that does; checkpoints likewise. With Megatron that is the last
rank for the losses, and rank 0 for what is saved.

Where a line names no step, the progress bar does that is drawn next; without a bar it is counted,
by epochs where the line names one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.launch.script_lines import Bar, Telling, read_line
from paceline.record import events as log
from paceline.record.metrics import StepMetrics

Found = StepMetrics | log.Evaluated | log.CheckpointSaved

STEPS_EVERY_S = 5.0
"""A line of metrics at most this often for a bar that shows steps and no numbers."""

LOOK_S = 0.1
"""Between two looks at what was printed."""

_LONGEST = 64 << 10
"""Bytes without a line's end that are kept."""

_OURS = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "accuracy", "step_s")
"""Fields of a step's line; other numbers are kept under `logged`."""

_TRAINS = re.compile(r"(?i)\W*(?:epoch|train|step|iter|batch)")
_EVALUATES = re.compile(r"(?i)\b(?:val|valid|validation|eval|evaluat|test|sanity|predict)")


class Numbers:
    """Reads one attempt of a script."""

    def __init__(self, *, generation: int, num_ranks: int) -> None:
        self._generation = generation
        self._num_ranks = num_ranks
        self._readers: dict[int, _Reader] = {}
        self._speaker: int | None = None
        self._saver: int | None = None
        self._lines = Lines(generation)
        self._on_bar: float | None = None
        """Evaluation loss that the bar shows."""

    def feed(self, rank: int, content: bytes, at: float) -> tuple[list[Found], bool]:
        """What a rank's output says that was not known, and whether there is progress in it."""
        reader = self._readers.setdefault(rank, _Reader())
        found = list(reader.feed(content))
        if not found:
            return [], False
        saves = [_is_save(telling) for telling in found]
        if True in saves and (self._saver is None or rank == 0):
            self._saver = rank
        if False in saves and (self._speaker is None or rank == 0):
            self._speaker = rank
        return self._records(self._heard(rank, found), at), True

    def _heard(self, rank: int, found: Iterable[Telling]) -> list[Telling]:
        """What counts of what a rank says: others may say it too."""
        return [
            telling
            for telling in found
            if rank == (self._saver if _is_save(telling) else self._speaker)
        ]

    def end(self, rank: int, at: float) -> list[Found]:
        """What was still waited for when a rank ended."""
        reader = self._readers.get(rank)
        if reader is None:
            return []
        records = self._records(self._heard(rank, reader.end()), at)
        return [*records, *self._lines.end()] if rank == self._speaker else records

    def _records(self, tellings: list[Telling], at: float) -> list[Found]:
        records: list[Found] = []
        for telling, printed_at in zip(tellings, self._spread(tellings, at), strict=True):
            values = dict(telling.values)
            if telling.bar is not None and "eval_loss" in values:  # shown again with every step
                is_old = values["eval_loss"] == self._on_bar
                self._on_bar = values.pop("eval_loss") if is_old else values["eval_loss"]
            each = values.pop("tokens_per_s_and_rank", None)
            if each is not None:
                values["tokens_per_s"] = each * self._num_ranks
            records += self._lines.add(
                telling.step,
                values,
                printed_at,
                num_steps=telling.num_steps,
                checkpoint=telling.checkpoint,
            )
        newest = {each.step: each for each in records if isinstance(each, StepMetrics)}
        return [each for each in records if newest.get(each.step, each) is each or _is_event(each)]

    def _spread(self, tellings: list[Telling], at: float) -> list[float]:
        """When each was printed: between two looks, as evenly as nobody knows better."""
        since = max(at - LOOK_S, self._lines.newest_at)
        return [at - (at - since) * n / len(tellings) for n in reversed(range(len(tellings)))]


class Lines:
    """Turns steps and numbers into lines of `metrics.jsonl` and events."""

    def __init__(self, generation: int, *, every_s: float = STEPS_EVERY_S) -> None:
        """Args:
        generation: The attempt.
        every_s: At most one line in this time for steps without numbers.
        """
        self._generation = generation
        self._every_s = every_s
        self._newest: StepMetrics | None = None
        self._left_out: StepMetrics | None = None
        self._timed: StepMetrics | None = None
        """Since when steps are timed: the last line that was written, or the first."""

        self._written_at = -math.inf
        self._num_steps: int | None = None

    @property
    def newest_at(self) -> float:
        """When the newest step was finished; -inf before one was."""
        return self._newest.at if self._newest is not None else -math.inf

    def add(
        self,
        step: int | None,
        values: Mapping[str, float],
        at: float,
        *,
        num_steps: int | None = None,
        checkpoint: str | None = None,
    ) -> Iterator[Found]:
        """The records of one telling.

        Args:
            step: None is the newest step, or without one the first.
            values: By our names where we have one; nan and inf are kept as not finite.
            at: When it was printed, in seconds since 1970.
            num_steps: Of the whole run, where it is known.
            checkpoint: Path of one that is complete.
        """
        newest = self._newest
        step = step if step is not None else newest.step if newest is not None else 1
        self._num_steps = num_steps or self._num_steps
        numbers = {k: v for k, v in values.items() if not k.startswith("eval_")}
        evaluation = {k: v for k, v in values.items() if k.startswith("eval_")}
        if numbers or (not evaluation and checkpoint is None):
            yield from self._step(step, numbers, at)
        loss = evaluation.get("eval_loss")
        if loss is not None:
            yield log.Evaluated(
                step=step,
                loss=loss if math.isfinite(loss) else None,
                seconds=evaluation.get("eval_runtime"),
                accuracy=evaluation.get("eval_accuracy"),
            )
        if checkpoint is not None:
            yield log.CheckpointSaved(step=step, checkpoint=checkpoint)

    def end(self) -> Iterator[StepMetrics]:
        """The last step, where its line was left out."""
        if self._left_out is not None:
            yield self._left_out

    def _step(self, step: int, numbers: Mapping[str, float], at: float) -> Iterator[StepMetrics]:
        shown = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        ours: dict[str, Any] = {name: shown[name] for name in _OURS if name in shown}
        logged = {name: value for name, value in shown.items() if name not in _OURS}
        not_finite = [name for name in ours if ours[name] is None]
        newest = self._newest
        if newest is not None and newest.step == step:
            line = replace(
                newest,
                logged=newest.logged | logged,
                not_finite=sorted({*(newest.not_finite or []), *not_finite}),
                **ours,
            )
            if line == newest:
                return
        else:
            took_s, timed = None, self._timed
            if timed is not None and step > timed.step:
                took_s = (at - timed.at) / (step - timed.step)
            line = StepMetrics(
                step=step,
                generation=self._generation,
                at=at,
                num_steps=self._num_steps,
                logged=logged,
                not_finite=not_finite,
                **{"step_s": took_s, **ours},
            )
        self._newest = line
        if self._timed is None or step < self._timed.step:
            self._timed = line
        if step == 0 and not numbers:  # a bar that has just been drawn
            return
        if not numbers and at - self._written_at < self._every_s:
            self._left_out = line
            return
        self._left_out, self._written_at, self._timed = None, at, line
        yield line


def _is_save(telling: Telling) -> bool:
    return telling.checkpoint is not None and not telling.values


def _is_event(found: Found) -> bool:
    return not isinstance(found, StepMetrics)


class _Reader:
    """What one rank prints, piece by piece."""

    def __init__(self) -> None:
        self._torn = b""
        self._bars = _Bars()
        self._waiting: Telling | None = None
        """Numbers whose step the next picture of the bar shows."""

        self._count = 0
        self._epochs = _Epochs()

    def feed(self, content: bytes) -> Iterator[Telling]:
        *pieces, torn = (self._torn + content).replace(b"\r", b"\n").split(b"\n")
        self._torn = torn[-_LONGEST:]
        for piece in pieces:
            yield from self._take(piece.decode("utf-8", "replace"))
        if self._torn.rstrip(b" ").endswith(b"]"):  # tqdm ends a picture when it draws the next
            picture = self._torn.decode("utf-8", "replace")
            found = read_line(picture)
            if found is not None and found.bar is not None:
                self._torn = b""
                yield from self._take(picture)

    def end(self) -> Iterator[Telling]:
        yield from self._take(self._torn.decode("utf-8", "replace"))
        if self._waiting is not None:
            yield self._at_bar(self._waiting)

    def _take(self, piece: str) -> Iterator[Telling]:
        telling = read_line(piece) if piece.strip() else None
        if telling is None:
            return
        if telling.bar is not None:
            shown = self._bars.take(telling.bar, has_loss="loss" in telling.values)
            if shown is None:
                return
            if self._waiting is not None:
                yield self._at_bar(self._waiting)
                self._waiting = None
            yield replace(telling, step=shown[0], num_steps=shown[1])
        elif telling.step is not None or telling.checkpoint is not None:
            yield self._epochs.place(telling)
        elif self._bars.is_drawn:
            if self._waiting is not None:
                yield self._at_bar(self._waiting)
            self._waiting = telling
            self._bars.is_told = True
        else:
            counted = self._counted(telling)
            if counted is not None:
                yield counted

    def _at_bar(self, telling: Telling) -> Telling:
        return replace(telling, step=self._bars.step, num_steps=self._bars.num_steps)

    def _counted(self, telling: Telling) -> Telling | None:
        evaluation = {k: v for k, v in telling.values.items() if k.startswith("eval_")}
        if self._epochs.has_steps or evaluation == telling.values:
            # Where other lines name steps this one is an epoch's summary: its means are no step's.
            return replace(telling, values=evaluation) if evaluation else None
        self._count += 1
        if telling.epoch is not None and telling.num_epochs is not None:
            return replace(telling, step=telling.epoch, num_steps=telling.num_epochs)
        return replace(telling, step=self._count)


@dataclass(slots=True)
class _Epochs:
    """Steps of the run from lines that name a step and an epoch, whatever the step counts."""

    has_steps: bool = False
    """Whether a line named a step."""

    epoch: int | None = None
    newest: int = 0
    before: int = 0
    """Steps of the epochs before this one, where each counts anew."""

    goes_on: bool = False
    """Whether steps were seen to go on over an epoch's end."""

    def place(self, telling: Telling) -> Telling:
        """The telling with its step, and all steps, of the run."""
        if telling.step is None:
            return telling
        self.has_steps = True
        if telling.epoch is None:
            return telling
        if self.epoch is not None and telling.epoch != self.epoch:
            if telling.step > self.newest and not telling.of_epoch:
                self.goes_on = True
            else:
                self.before += telling.num_steps or self.newest
        self.epoch, self.newest = telling.epoch, telling.step
        num_steps = telling.num_steps
        if (self.before or telling.of_epoch) and num_steps is not None:
            num_steps = num_steps * telling.num_epochs if telling.num_epochs else None
        elif not self.goes_on and telling.num_epochs != 1:
            num_steps = None  # of the epoch, or of the run: the next epoch shows it
        return replace(telling, step=self.before + telling.step, num_steps=num_steps)


@dataclass(slots=True)
class _Bars:
    """Which of the bars counts steps, and where it is."""

    total: int | None = None
    done: int = 0
    before: int = 0
    """Steps of earlier bars of the same kind: epochs."""

    is_drawn: bool = False
    is_told: bool = False
    """Whether numbers came with this bar."""

    first_epoch: int | None = None
    num_epochs: int | None = field(default=None)

    @property
    def step(self) -> int:
        return self.before + self.done

    @property
    def num_steps(self) -> int | None:
        if self.total is None or self.num_epochs is not None:
            return self.total and self.num_epochs and self.total * self.num_epochs
        return self.total if self.before == 0 and self.first_epoch is None else None

    def take(self, bar: Bar, *, has_loss: bool) -> tuple[int, int | None] | None:
        """Its step and all steps; None for a bar that counts something else."""
        if _EVALUATES.search(bar.title) or (bar.is_inner and not has_loss):
            return None
        if bar.title and not has_loss and not _TRAINS.match(bar.title):
            return None
        if self.is_drawn and bar.total != self.total:
            is_over = self.done == self.total and not self.is_told
            if not has_loss and not is_over:
                return None
            self.is_drawn = False
        if not self.is_drawn:
            self.is_drawn, self.total, self.done, self.before = True, bar.total, 0, 0
            self.is_told, self.first_epoch = False, None
        self._count_epochs(bar)
        self.done = bar.done
        self.is_told |= has_loss
        return self.step, self.num_steps

    def _count_epochs(self, bar: Bar) -> None:
        epoch = re.search(r"(?i)epoch\s*(?P<epoch>\d+)(?:\s*/\s*(?P<all>\d+))?", bar.title)
        if epoch is None:
            if bar.done < self.done:
                self.before += self.total or self.done
            return
        number = int(epoch["epoch"])
        if self.first_epoch is None:
            self.first_epoch = 1 if number == 1 or epoch["all"] else 0
        self.before = (number - self.first_epoch) * (self.total or 0)
        self.num_epochs = int(epoch["all"]) if epoch["all"] else None

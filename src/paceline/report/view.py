"""A run as far as it has been read: what the top of its page is made from, live or frozen.

Smaller than a `RunRecord`: numbers of steps are columns, so that a hundred thousand of them can be
looked at again several times a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.plan import Plan
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.machine_series import MachineSeries
from paceline.record.series import Series
from paceline.report.timeline import Failure, Part, all_failures, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    name: str
    folder: str
    created_at: float
    """Seconds since 1970 (UTC)."""

    num_steps: int | None
    """Steps asked for; None where nobody knows, as with a script of your own."""

    global_batch: int | None = None
    is_program: bool = False
    """Whether your own program trains."""

    plan: Plan | None = None
    events: Sequence[log.AnyEvent] = ()
    series: Series = field(default_factory=Series)
    machines: MachineSeries = field(default_factory=MachineSeries)
    is_running: bool = False
    """Whether a process holds the run now."""

    now_s: float | None = None
    """Seconds since 1970; None for a page that is frozen, where time ends with the record."""

    data_padding: float | None = None

    def parts(self) -> tuple[Part, ...]:
        """Every time the controller took charge, in order; without the steps."""
        every = parts_of(self.events, ())
        newest = self.series.newest("at")
        if not every or every[-1].finished is not None or newest is None:
            return every
        last = replace(every[-1], end=max(every[-1].end, newest))
        return (*every[:-1], last)

    def failures(self) -> list[Failure]:
        """Every failure, in order."""
        return [failure for _, failure in all_failures(self.parts())]

    @property
    def unit(self) -> str:
        """`tokens`, or `samples` for a program that does not count tokens."""
        rate, step_s = self.series.newest("speed/tokens_per_s"), self.series.newest("speed/step_s")
        if not self.is_program or self.global_batch is None or rate is None or step_s is None:
            return "tokens"
        off = abs(rate * step_s - self.global_batch)
        return "samples" if off < 0.01 * self.global_batch else "tokens"


def view_of(record: RunRecord) -> RunView:
    """A whole record as a view that does not change."""
    series = Series()
    series.take(record.metrics)
    machines = MachineSeries()
    machines.take(record.machines)
    spec = record.job
    return RunView(
        name=record.name,
        folder=record.folder,
        created_at=record.created_at,
        num_steps=spec.train.steps if spec is not None else series.num_steps,
        global_batch=spec.train.global_batch if spec is not None else None,
        is_program=spec is None or spec.program is not None,
        plan=record.plan,
        events=record.events,
        series=series,
        machines=machines,
        is_running=record.is_running,
        data_padding=record.data_padding,
    )

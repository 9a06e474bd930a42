"""Judges alert rules beside a run's controller, whether anybody watches or not.

A thread follows the run's files, so nothing is asked of workers or agents, and what it does slowly
or wrongly delays nobody. Alerts are recorded by the controller; messages go out by `notify.py`.

A controller that takes over, or a run that is resumed, reads what was before again and reports
nothing of it a second time.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from paceline.control.alerts import Rules, rules_of
from paceline.job.alerts import AlertsSpec
from paceline.launch.default_alerts import alerts as default_alerts
from paceline.launch.notify import Teller, message_of
from paceline.plan import Plan
from paceline.record.events import AlertFired, AlertOver, AnyEvent, Event, Noted, Reported
from paceline.record.follow import Follower, RunFollower
from paceline.record.machines import MachineSample, decode_machine, machine_files
from paceline.record.metrics import StepMetrics
from paceline.record.samples import Sample, Sampler

LOOK_EVERY_S = 0.5
"""Between two looks at the files: half of a second is late for nobody. A guess."""

_LAST_LOOK_S = 5.0
"""How long the end of a run waits for the last look. A guess."""

Line = StepMetrics | MachineSample | AnyEvent


class Alarms:
    """The rules of one run, for as long as one controller has it."""

    def __init__(
        self,
        run: Path,
        name: str,
        alerts: AlertsSpec,
        plan: Plan | None,
        record: Callable[[Reported], None],
    ) -> None:
        rules = rules_of(alerts, default_alerts(plan))
        self._name = name
        self._record = record
        self._own = [rule for rule in alerts.rules if rule.metric is not None]
        self._rules = Rules(rules, to=tuple(alerts.to))
        self._reader = Reader(run, usd_per_h=usd_per_h(plan))
        self._teller = Teller(alerts.targets, record)
        self.began = time.time()
        """What was written before is not reported."""

        self._is_new = True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look once more, and send what is left; takes ten seconds at most."""
        self._over.set()
        self._thread.join(_LAST_LOOK_S)
        self._teller.close()

    def look(self, now: float) -> None:
        """Judge what is new. The first look takes in what was written before, without a word."""
        if self._is_new:
            self._is_new = False
            self._catch_up(now)
        self._judge(self._reader.look(now))

    def _work(self) -> None:
        try:
            self.look(time.time())
            while not self._over.wait(LOOK_EVERY_S):
                self.look(time.time())
            self.look(time.time())
            for rule in self._own:
                if rule.name not in self._rules.measured:
                    text = f"alert rule {rule.name} was never judged: {rule.metric} has no sample"
                    self._record(Noted(text=text))
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            why = f"{type(error).__name__}: {error}"
            self._record(Noted(text=f"alerts are no longer judged: {why}"))

    def _catch_up(self, now: float) -> None:
        lines = self._reader.lines()
        old = [line for line in lines if line.at < self.began]
        for line in old:
            for sample in self._reader.samples_of(line, now):
                for _ in self._rules.take(sample):
                    pass
        self._rules.resume(line for line in old if isinstance(line, Event))
        for line in lines[len(old) :]:
            self._judge(self._reader.samples_of(line, now))

    def _judge(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            for change in self._rules.take(sample):
                self._tell(change)

    def _tell(self, change: AlertFired | AlertOver) -> None:
        self._record(change)
        for target in change.to:
            self._teller.tell(target, message_of(change, self._name))


class Reader:
    """What is new in a run's folder, as samples."""

    def __init__(self, run: Path, *, usd_per_h: float | None) -> None:
        """Args:
        run: The run's folder.
        usd_per_h: What its machines cost an hour; None is unknown.
        """
        self._run = run
        self._steps = RunFollower(run)
        self._machines: dict[Path, Follower[MachineSample]] = {}
        self._sampler = Sampler(usd_per_h=usd_per_h)

    def look(self, now: float) -> Iterator[Sample]:
        """Samples of everything that is new, and of what the clock alone changes."""
        for line in self.lines():
            yield from self.samples_of(line, now)
        yield from self._sampler.of_clock(now)

    def lines(self) -> list[Line]:
        """New lines of all files, in the order of their times."""
        news = self._steps.look()
        lines: list[Line] = [*news.metrics, *news.events]
        for path in machine_files(self._run):
            if path not in self._machines:
                self._machines[path] = Follower(path, decode_machine)
        for follower in self._machines.values():
            lines += follower.look().lines
        return sorted(lines, key=lambda line: line.at)

    def samples_of(self, line: Line, now: float) -> Iterator[Sample]:
        """Samples of one line, read at a moment."""
        match line:
            case StepMetrics():
                return self._sampler.of_step(line, now)
            case MachineSample():
                return self._sampler.of_machine(line)
            case _:
                return self._sampler.of_event(line, now)

    def replay(self) -> Iterator[Sample]:
        """Samples of the whole record, each as when it was written."""
        for line in self.lines():
            yield from self._sampler.of_clock(line.at)
            yield from self.samples_of(line, line.at)


def stamped(events: Iterable[Reported], generation: int) -> Iterator[Reported]:
    """What was found after a run's end, as its controller would have recorded it."""
    for event in events:
        yield msgspec.structs.replace(event, at=time.time(), generation=generation)


def usd_per_h(plan: Plan | None) -> float | None:
    """What the plan's machines cost an hour, by the catalog's price; None where none is known."""
    if plan is None or plan.cost is None:
        return None
    return plan.cost.per_instance_hour_usd * plan.cost.num_instances

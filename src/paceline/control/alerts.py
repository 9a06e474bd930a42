"""Alert rules on a run's numbers: which fire now, and which are over.

Pure: the same samples make the same alerts. Leaves out where samples come from
(`record/samples.py`), who takes them (`launch/judge_alerts.py`) and who is sent a message
(`launch/notify.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from paceline.errors import Problem, did_you_mean
from paceline.job.alerts import AlertSpec, AlertsSpec
from paceline.job.yaml_text import Place, Where
from paceline.record.events import AlertFired, AlertOver, AnyEvent
from paceline.record.metric_names import METRICS, find_metric
from paceline.record.samples import Sample

EVENTS = frozenset(
    event.__name__ for event in get_args(AnyEvent) if not event.__name__.startswith("Alert")
)
"""Names that a rule's `event` can have: no alert is about alerts."""


@dataclass(slots=True)
class _State:
    """One rule and one rank, GPU or node."""

    count: int = 0
    """Samples in a row for which it has held."""

    since: float | None = None
    """When the first of them was taken."""

    best: float | None = None
    worse: int = 0
    """Samples in a row that were no improvement."""

    fired_at: float | None = None
    """When it last fired."""

    is_firing: bool = False


@dataclass(slots=True)
class Rules:
    """Rules and how they stand."""

    rules: Sequence[AlertSpec]
    to: Sequence[str] = ("console",)
    """Targets of rules that name none."""

    measured: set[str] = field(default_factory=set)
    """Rules whose metric has had a sample, by name."""

    _states: dict[tuple[str, str], _State] = field(default_factory=dict)
    _newest: dict[tuple[str, str], float | None] = field(default_factory=dict)
    _by_metric: dict[str, list[AlertSpec]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.rules:
            self._by_metric.setdefault(rule.metric or f"event {rule.event}", []).append(rule)

    def take(self, sample: Sample) -> Iterator[AlertFired | AlertOver]:
        """The rules that fire with this sample, and those that are over. A rule fires once while it
        holds, and again after its pause."""
        self._newest[sample.metric, sample.of] = sample.value
        for rule in self._by_metric.get(sample.metric, ()):
            self.measured.add(rule.name)
            state = self._states.setdefault((rule.name, sample.of), _State())
            if rule.event is not None:
                if _may_fire(rule, state, sample.at):
                    state.fired_at = sample.at
                    yield self._fired(rule, sample)
                continue
            holds = self._holds(rule, state, sample)
            if holds and not state.is_firing and _may_fire(rule, state, sample.at):
                state.is_firing, state.fired_at = True, sample.at
                yield self._fired(rule, sample)
            elif state.is_firing and not holds:
                state.is_firing = False
                yield self._over(rule, sample)

    def resume(self, events: Iterable[AnyEvent]) -> None:
        """Let what the record says count as told: for a controller that takes over, and a run that
        is resumed. Call it after the samples of before were taken."""
        for state in self._states.values():
            state.is_firing, state.fired_at = False, None
        for event in events:
            if isinstance(event, AlertFired | AlertOver):
                state = self._states.setdefault((event.rule, event.of), _State())
                state.is_firing = isinstance(event, AlertFired) and event.condition[:6] != "event "
                state.fired_at = event.at if isinstance(event, AlertFired) else state.fired_at

    def _holds(self, rule: AlertSpec, state: _State, sample: Sample) -> bool:
        value = sample.value
        if rule.plateau is not None:
            if _is_better(rule, state.best, value):
                state.best, state.worse = value, 0
            else:
                state.worse += 1
            return state.worse >= rule.plateau.patience
        breaks = rule.not_finite if value is None else _is_outside(rule, value)
        when = rule.when
        if breaks and when is not None:
            breaks = when.holds(self._newest.get((when.metric, sample.of)))
        if not breaks:
            state.count, state.since = 0, None
            return False
        state.count += 1
        state.since = sample.at if state.since is None else state.since
        return state.count >= rule.steps and sample.at - state.since >= (rule.lasting or 0.0)

    def _fired(self, rule: AlertSpec, sample: Sample) -> AlertFired:
        about = self._about(rule, sample)
        return AlertFired(
            condition=rule.condition, action=rule.action, on_alert=rule.on_alert, **about
        )

    def _over(self, rule: AlertSpec, sample: Sample) -> AlertOver:
        return AlertOver(**self._about(rule, sample))

    def _about(self, rule: AlertSpec, sample: Sample) -> dict[str, Any]:
        return {
            "at": sample.at,
            "rule": rule.name,
            "metric": rule.metric or rule.event or "",
            "value": sample.value,
            "of": sample.of,
            "step": sample.step,
            "severity": rule.severity,
            "to": list(self.to if rule.to is None else rule.to),
        }


def _may_fire(rule: AlertSpec, state: _State, at: float) -> bool:
    if state.fired_at is None:
        return True
    return rule.again != "never" and at - state.fired_at >= rule.again


def _is_outside(rule: AlertSpec, value: float) -> bool:
    return (rule.above is not None and value > rule.above) or (
        rule.below is not None and value < rule.below
    )


def _is_better(rule: AlertSpec, best: float | None, value: float | None) -> bool:
    assert rule.plateau is not None
    if value is None or best is None:
        return value is not None
    gain = best - value if rule.plateau.best == "lowest" else value - best
    return gain > rule.plateau.min_delta


def rules_of(alerts: AlertsSpec, defaults: Iterable[AlertSpec]) -> list[AlertSpec]:
    """The rules that are judged: those of the job, and the built-in ones that it leaves on. Metrics
    have their own names, whatever word the job has for them."""
    own = {rule.name for rule in alerts.rules}
    kept = [rule for rule in defaults if rule.name not in own and rule.name not in alerts.without]
    return [*(kept if alerts.defaults else []), *map(_with_names, alerts.rules)]


def _with_names(rule: AlertSpec) -> AlertSpec:
    when = rule.when
    if when is not None:
        when = replace(when, metric=_name_of(when.metric))
    return replace(rule, metric=rule.metric and _name_of(rule.metric), when=when)


def _name_of(word: str) -> str:
    metric = find_metric(word)
    return metric.name if metric is not None else word


def is_firing(events: Iterable[AnyEvent]) -> list[AlertFired]:
    """Alerts that have fired and are not over, oldest first; those on events never are."""
    found: dict[tuple[str, str], AlertFired] = {}
    for event in events:
        if isinstance(event, AlertFired) and event.condition[:6] != "event ":
            found[event.rule, event.of] = event
        elif isinstance(event, AlertOver):
            found.pop((event.rule, event.of), None)
    return list(found.values())


def check_names(alerts: AlertsSpec, where: Where, *, logs_its_own: bool) -> Iterator[Problem]:
    """`J017` for metrics and events that no run has, with the nearest that it has.

    Args:
        logs_its_own: Whether the program may have metrics of its own: then any name may be right.
    """
    for number, rule in enumerate(alerts.rules):
        here: Place = ("rules", number)
        if rule.event is not None and rule.event not in EVENTS:
            yield _unknown("event", rule.event, EVENTS, where((*here, "event")))
        named = [(rule.metric, (*here, "metric"))]
        if rule.when is not None:
            named.append((rule.when.metric, (*here, "when", "metric")))
        for metric, place in named:
            if metric is not None and find_metric(metric) is None and not logs_its_own:
                yield _unknown("metric", metric, METRICS, where(place))


def _unknown(kind: str, name: str, known: Collection[str], where: str) -> Problem:
    return Problem(
        code="J017",
        what=f"no run has the {kind} {name!r}",
        where=where,
        fix=did_you_mean(name, known, cutoff=0.4) or f"known: {', '.join(sorted(known))}",
    )

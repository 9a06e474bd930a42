"""Alerts as lines for a person."""

from collections import Counter
from collections.abc import Sequence

from paceline.control.alerts import is_firing
from paceline.job.alerts import CONSOLE
from paceline.record.events import AlertFired, AlertNotSent, AlertOver, AnyEvent


def describe_alert(event: AnyEvent) -> str | None:
    """One line, or None for what the console is not sent, and for other events."""
    match event:
        case AlertFired() | AlertOver() if CONSOLE in event.to:
            return alert_line(event)
        case AlertNotSent():
            return f"alert {event.rule} was not sent to {event.target}: {event.reason}"
        case _:
            return None


def alert_line(event: AlertFired | AlertOver) -> str:
    """One line, whoever is sent it."""
    if isinstance(event, AlertOver):
        return f"alert over: {event.rule}{_of(event)}, {event.metric} is {_value(event.value)}"
    action = f"; {event.action}" if event.action else ""
    return f"ALERT ({event.severity}) {alert_text(event)}{_DOES[event.on_alert]}{action}"


def summarise_alerts(events: Sequence[AnyEvent]) -> list[str]:
    """A run's alerts, for its end and its status: those that fire, then each rule that fired, with
    how often where it was more than once. A rule such as `restarted` fires once for any number."""
    lines = [f"{event.severity}: {alert_text(event)}" for event in is_firing(events)]
    fired = Counter(event.rule for event in events if isinstance(event, AlertFired))
    if fired:
        counts = ", ".join(
            rule if count == 1 else f"{rule} {count} times" for rule, count in fired.items()
        )
        lines.append(f"fired: {counts}")
    return lines


def alert_text(event: AlertFired) -> str:
    """Rule, value and condition."""
    step = "" if event.step is None else f" at step {event.step}"
    if event.condition.startswith("event "):
        return f"{event.rule}{_of(event)}: {event.condition}{step}"
    is_now = f"{event.metric} is {_value(event.value)}{step}"
    return f"{event.rule}{_of(event)}: {is_now} ({event.condition})"


def _of(event: AlertFired | AlertOver) -> str:
    return f", {event.of}" if event.of else ""


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


_DOES = {"note": "", "stop": "; saving and stopping", "checkpoint": "; saving a checkpoint"}

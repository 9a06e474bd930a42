"""What a drill and a soak found, as plain text."""

from collections.abc import Mapping
from typing import Any

from paceline.check.drill.oracle import Outcome, Verdict
from paceline.launch.drill import Ran
from paceline.units import counted, format_seconds


def verdict_lines(verdict: Verdict, ran: Ran) -> list[str]:
    """What a drill found, for a person."""
    lines = [""]
    for outcome in verdict.outcomes:
        lines += _outcome_lines(outcome)
    lines.append("")
    marks = {True: "ok", False: "NO", None: "--"}
    lines += [f"{marks[check.ok]:<3} {check.name:<12} {check.says}" for check in verdict.checks]
    lines += ["", f"{'PASSED' if verdict.is_right else 'FAILED'}  {ran.run.path}"]
    return lines


def _outcome_lines(outcome: Outcome) -> list[str]:
    if not outcome.happened:
        return [f"{outcome.fault}: did not happen"]
    mark = {True: "right", False: "WRONG", None: "not checked"}[outcome.is_right]
    lines = [f"{outcome.fault}: {outcome.verdict or 'not named'} ({mark})"]
    event = outcome.recovered
    if event is not None:
        phases = [
            ("detect", event.detect_s),
            ("fence", event.fence_s),
            ("meet", event.start_s),
            ("state", event.restore_s),
            ("first step", event.first_step_s),
            ("in all", event.downtime_s),
        ]
        shown = ", ".join(f"{n} {format_seconds(s)}" for n, s in phases if s is not None)
        lines.append(
            f"    {shown}; {counted(event.steps_lost, 'step')} lost, state from {event.source}"
        )
    return lines


def soak_lines(summary: Mapping[str, Any]) -> list[str]:
    """What a soak came to, for a person."""
    longest = summary["longest_downtime_s"]
    return [
        "",
        f"{summary['passed']} of {summary['schedules']} schedules passed: {summary['faults']} "
        f"faults, {summary['recoveries']} recoveries, {summary['steps_lost']} repeated steps"
        + (f", longest downtime {longest:.2f} s" if longest is not None else ""),
        *(f"FAILED seed {f['seed']}: {f['says']}; {f['run']}" for f in summary["failed"]),
    ]

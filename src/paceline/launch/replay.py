"""Alert rules judged on a run as it was recorded: nothing is sent, and nothing is written."""

from dataclasses import dataclass
from pathlib import Path

from paceline.control.alerts import Rules, check_names, rules_of
from paceline.errors import JobError
from paceline.job.alerts import AlertSpec
from paceline.job.load import load_alerts
from paceline.launch.default_alerts import alerts as default_alerts
from paceline.launch.judge_alerts import Reader, usd_per_h
from paceline.launch.run_status import find_run
from paceline.record.events import AlertFired


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One rule, and when it would have fired."""

    rule: AlertSpec
    fired: list[AlertFired]
    is_measured: bool
    """Whether its metric has a sample in the record."""


def replay(named: str, runs: Path, file: Path | None) -> list[Judged]:
    """Each rule of a run, or of a file, and when it would have fired.

    Raises:
        JobError: There is no such run, or the rules cannot be judged.
    """
    run = find_run(named, runs)
    script = run.script()
    plan = run.plan() if script is None and run.plan_file.exists() else None
    if file is None:
        alerts = script.spec.alerts if script is not None else run.job().spec.alerts
    else:
        alerts, where = load_alerts(file, of_script=script is not None)
        its_own = script is not None or run.job().spec.program is not None
        JobError.raise_for(check_names(alerts, where, logs_its_own=its_own))
    rules = Rules(rules_of(alerts, default_alerts(plan)), to=tuple(alerts.to))
    fired = [
        change
        for sample in Reader(run.path, usd_per_h=usd_per_h(plan)).replay()
        for change in rules.take(sample)
        if isinstance(change, AlertFired)
    ]
    return [
        Judged(
            rule=rule,
            fired=[event for event in fired if event.rule == rule.name],
            is_measured=rule.name in rules.measured or rule.event is not None,
        )
        for rule in rules.rules
    ]

"""What is seen of a plan's run: numbers that its engine writes, and the rules that judge them."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from paceline.control.alerts import rules_of
from paceline.job import Job
from paceline.job.alerts import AlertSpec
from paceline.launch.default_alerts import alerts
from paceline.launch.engine_run import launcher_of
from paceline.plan import Plan
from paceline.record.metric_names import METRICS
from paceline.record.metrics import StepMetrics
from paceline.render.mlx import runs_mlx

_OF_SCRIPTS = ("num_steps", "not_finite")
_OWN = tuple(each.name for each in fields(StepMetrics) if each.name not in _OF_SCRIPTS)
_WORD = re.compile(r"[a-z]+_\w+")
_TIMED = ("step", "generation", "at", "step_s", "num_steps")
"""Fields of a step's line (docs/reference/metrics.md): our runtime's, and those that the controller
writes of every step that another program prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a run of the plan's engine leaves of a step, and what looks at it."""

    metrics: tuple[str, ...] | None = None
    """Fields of a step; None where it is not known what the engine prints."""

    rules: tuple[AlertSpec, ...] | None = None
    """Alert rules that are judged while it runs; None where nobody judges any."""

    why_none: str = ""
    """Why nobody does."""

    def shows(self, text: str) -> bool:
        """Whether the run has every field of a step that a text names.

        >>> Watched(metrics=("loss",)).shows("vote_s grows")
        False
        """
        return {*_WORD.findall(text)} & {*_OWN} <= {*(self.metrics or ())}


def watched(plan: Plan, job: Job) -> Watched:
    """The numbers and rules of a run that the plan's own engine trains."""
    own = job.spec.alerts
    if runs_mlx(plan):
        why = "launch.sh starts MLX, whose program prints step and loss on standard output: no run "
        return Watched(metrics=("step", "loss"), why_none=f"{why}folder, and nobody who judges it")
    if plan.engine == "paceline":
        return Watched(metrics=_OWN, rules=tuple(rules_of(own, alerts(plan))))
    launcher = launcher_of(plan.engine)
    if launcher is None:
        return Watched(why_none=f"`paceline run` starts no {plan.engine}, and writes nothing of it")
    written = (*_TIMED, *launcher.prints)
    has_gpus = plan.cluster.backend == "nccl"
    rules = [rule for rule in alerts(None) if _is_written(rule, written, has_gpus=has_gpus)]
    return Watched(metrics=written, rules=tuple(rules_of(own, rules)))


def alert_rows(rules: Iterable[AlertSpec] | None, *more: str) -> list[dict[str, Any]] | None:
    """Rules as a contract has them.

    Args:
        more: Fields of a rule besides the four that every list of them has.
    """
    if rules is None:
        return None
    names = ("condition", *more, "threshold", "severity", "action")
    return [
        {name: getattr(rule, name) for name in names}
        | ({"metric": rule.metric or f"event {rule.event}"} if "metric" in more else {})
        for rule in rules
    ]


def _is_written(rule: AlertSpec, written: Collection[str], *, has_gpus: bool) -> bool:
    """Whether a built-in rule has numbers: of a program's step, of machines, or of the run."""
    if rule.metric is None or (rule.metric.startswith("gpu/") and not has_gpus):
        return False  # events name ranks by what our own runtime says of each
    field = METRICS[rule.metric].field
    return field is None or field in written

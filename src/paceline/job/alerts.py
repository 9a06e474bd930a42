"""The section `alerts` of a job file, or a file of its own: rules on a run's numbers, and targets.

Leaves out: which metrics there are (`record/metric_names.py`), and judging (`control/alerts.py`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from paceline.errors import Problem
from paceline.job.section import Number, Positive, Wait, section
from paceline.job.yaml_text import Place, Where

Severity = Literal["critical", "warning", "info"]

CONSOLE = "console"

DEFAULTS = (
    *("no-progress", "loss-not-finite", "slow", "straggler", "memory-full", "restarted"),
    *("gpu-hot", "gpu-idle", "gpu-spins", "disk-full", "checkpoint-old", "over-budget"),
    *("no-gradient", "loss-scale-low", "loss-outlier"),
)
"""Names of the rules that `launch.default_alerts` makes; which of them depends on the plan."""

_EVALUATION_LOSS = ("eval/loss", "eval_loss", "val/loss", "val_loss", "held_out_loss", "Loss/val")
_ENV = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SECRET = ("webhook", "slack", "password")


def _check_env(value: str) -> str:
    if not _ENV.fullmatch(value):
        raise ValueError("this is kept in the run's folder; write env:NAME")
    return value


Variable = Annotated[str, AfterValidator(_check_env)]
"""The name of an environment variable that holds an address or a password: `env:NAME`."""

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@section
class ConditionSpec:
    """A metric above or below a number."""

    metric: str
    """Name of the metric, of the same rank or GPU."""

    above: Number | None = None
    """Holds while the newest value is above this."""

    below: Number | None = None
    """Holds while the newest value is below this."""

    def holds(self, value: float | None) -> bool:
        """Whether a value is above or below; what is not known is neither."""
        if value is None:
            return False
        return (self.above is not None and value > self.above) or (
            self.below is not None and value < self.below
        )


@section
class PlateauSpec:
    """No improvement."""

    patience: Positive
    """Samples in a row without an improvement."""

    min_delta: Annotated[Number, Field(ge=0)] = 0.0
    """An improvement is better than the best so far by more than this."""

    best: Literal["lowest", "highest"] = "lowest"
    """Which values are better."""


@section
class AlertSpec:
    """One rule. It needs `metric` with one of `above`, `below`, `not_finite` and `plateau`; or
    `event`."""

    name: _Name
    """Name of the rule. One with a built-in rule's name takes its place."""

    metric: str | None = None
    """Name of the metric: `train/loss`, `speed/tokens_per_s`, `gpu/temperature_c`. Each rank, GPU
    or node is judged by itself."""

    event: str | None = None
    """Instead of `metric`: an event of events.jsonl, such as `WorkerLost`. Fires when it comes."""

    above: Number | None = None
    """Fires when the metric is above this."""

    below: Number | None = None
    """Fires when the metric is below this."""

    not_finite: bool = False
    """Fires when the metric is infinite or not a number."""

    plateau: PlateauSpec | None = None
    """Fires when the metric has not improved for so many samples."""

    steps: Positive = 1
    """Samples in a row for which it must hold: steps, for what is measured every step."""

    lasting: Wait | None = None
    """Time for which it must hold as well: `60s`."""

    when: ConditionSpec | None = None
    """Fires only while another metric of the same rank, GPU or node is above or below a number."""

    severity: Severity = "warning"
    """How bad it is."""

    action: str = ""
    """What to do about it; part of the message."""

    to: list[str] | None = None
    """Targets that are sent a message: `console`, or names of `targets`. Left out, `alerts.to`. An
    empty list: only the record has it."""

    on_alert: Literal["note", "checkpoint", "stop"] = "note"
    """What the run does. `note`: nothing. `checkpoint`: save one after the step. `stop`: save and
    end, as after Ctrl-C."""

    again: Wait | Literal["never"] = 3600.0
    """A rule that has fired fires again, once it has been over, after this at the earliest."""

    @property
    def condition(self) -> str:
        """The rule as one expression.

        >>> AlertSpec(name="slow", metric="speed/tokens_per_s", below=100.0, steps=20).condition
        'speed/tokens_per_s < 100 for 20 steps'
        """
        if self.event is not None:
            return f"event {self.event}"
        rule = " or ".join(self._parts())
        if self.when is not None:
            limits = (("> ", self.when.above), ("< ", self.when.below))
            shown = [f"{sign}{_number(limit)}" for sign, limit in limits if limit is not None]
            rule += f" while {self.when.metric} {' or '.join(shown)}"
        rule += f" for {self.steps} steps" if self.steps > 1 else ""
        return rule + (f" for {self.lasting:g} s" if self.lasting is not None else "")

    def _parts(self) -> Iterator[str]:
        for sign, limit in ((">", self.above), ("<", self.below)):
            if limit is not None:
                yield f"{self.metric} {sign} {_number(limit)}"
        if self.not_finite:
            yield f"{self.metric} is not finite"
        if self.plateau is not None:
            best = "lower" if self.plateau.best == "lowest" else "higher"
            by = f" by {self.plateau.min_delta:g}" if self.plateau.min_delta else ""
            yield f"{self.metric} not {best}{by} for {self.plateau.patience} samples"

    @property
    def threshold(self) -> str:
        """The number of the rule, or what else has to happen, as text."""
        value = self.above if self.above is not None else self.below
        if value is not None:
            return _number(value)
        if self.not_finite:
            return "not finite"
        return f"{self.plateau.patience} samples" if self.plateau is not None else "one event"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@section
class TargetSpec:
    """Who is sent messages. Exactly one of `webhook`, `slack` and `smtp`."""

    webhook: Variable | None = None
    """`env:NAME`: the environment variable with the address that a JSON object is posted to."""

    slack: Variable | None = None
    """`env:NAME`: the environment variable with the webhook address of Slack, Mattermost or
    another that takes `{"text": ...}`."""

    smtp: str | None = None
    """Mail server, `host:port`."""

    sender: str | None = None
    """Only with `smtp`: address that the mail is from."""

    recipients: list[str] = Field(default_factory=list)
    """Only with `smtp`: addresses that it is sent to."""

    user: str | None = None
    """Only with `smtp`: name to log in with."""

    password: Variable | None = None
    """Only with `smtp`: `env:NAME`, the environment variable with its password."""

    tls: Literal["starttls", "implicit", "none"] = "starttls"
    """Only with `smtp`: how the connection is encrypted. `none` is for a server on this machine."""


@section
class AlertsSpec:
    """Rules on the run's numbers, judged beside the controller, also when nobody watches."""

    defaults: bool = True
    """Whether the built-in rules are judged: `paceline alerts RUN` lists them."""

    without: list[str] = Field(default_factory=list)
    """Built-in rules that are not."""

    rules: list[AlertSpec] = Field(default_factory=list)
    """Rules of your own."""

    to: list[str] = Field(default_factory=lambda: [CONSOLE])
    """Targets of the rules that name none: `console`, or names of `targets`."""

    targets: dict[str, TargetSpec] = Field(default_factory=dict)
    """Name -> who is sent messages by webhook, Slack or e-mail."""


def check_alerts(alerts: AlertsSpec, where: Where, *, of_script: bool = False) -> Iterator[Problem]:
    """`J016` for rules that contradict themselves, and names that lead nowhere.

    Args:
        where: Place of a key -> where that is, for people.
        of_script: Whether they are of a program that does not use Paceline's runtime.
    """
    names = [rule.name for rule in alerts.rules]
    for number, rule in enumerate(alerts.rules):
        here = ("rules", number)
        if names.index(rule.name) != number:
            yield _problem(f"two rules are named {rule.name}", where((*here, "name")), "rename one")
        yield from _check_condition(rule, where(here))
        yield from _check_action(rule, where((*here, "on_alert")), of_script)
        yield from _check_targets(rule.to or [], alerts, where((*here, "to")))
    yield from _check_targets(alerts.to, alerts, where(("to",)))
    for name in alerts.without:
        if name not in DEFAULTS:
            known = ", ".join(DEFAULTS)
            yield _problem(
                f"there is no built-in rule {name!r}", where(("without",)), f"known: {known}"
            )
    for name, target in alerts.targets.items():
        yield from _check_target(name, target, where(("targets", name)))


def _check_condition(rule: AlertSpec, where: str) -> Iterator[Problem]:
    limits = (rule.above, rule.below, rule.plateau)
    has_condition = rule.not_finite or any(limit is not None for limit in limits)
    if (rule.metric is None) == (rule.event is None):
        what = f"rule {rule.name} needs either `metric` or `event`"
        yield _problem(what, where, "give one of them: metric: train/loss")
    elif rule.event is not None:
        has_time = rule.steps > 1 or rule.lasting is not None or rule.when is not None
        if has_condition or has_time:
            what = f"rule {rule.name} is on an event, which has no value and no duration"
            yield _problem(what, where, "keep `event` alone, or name a metric")
    elif not has_condition:
        what = f"rule {rule.name} says nothing of {rule.metric}"
        yield _problem(what, where, "add above, below, not_finite or plateau")
    elif rule.plateau is not None and (
        any(each is not None for each in (rule.above, rule.below, rule.lasting, rule.when))
        or rule.not_finite
        or rule.steps > 1
    ):
        what = f"rule {rule.name} has a plateau and another condition"
        fix = "keep `plateau` alone, with its own patience; make another rule of the rest"
        yield _problem(what, where, fix)
    if rule.when is not None and rule.when.above is None and rule.when.below is None:
        what = f"`when` of rule {rule.name} has no limit"
        yield _problem(what, where, "add above or below")


def _check_action(rule: AlertSpec, where: str, of_script: bool) -> Iterator[Problem]:
    if rule.on_alert == "checkpoint" and of_script:
        yield _problem(
            f"rule {rule.name} asks for a checkpoint, and your own script saves by itself",
            where,
            "use `note` or `stop`, which sends SIGTERM to every process",
        )
    is_early = rule.plateau is not None and rule.metric in _EVALUATION_LOSS
    if is_early and rule.on_alert == "stop" and not of_script:
        yield _problem(
            f"rule {rule.name} is early stopping, which keeps no best checkpoint as a rule",
            where,
            "set evaluate.patience, which keeps it, and leave on_alert out",
        )


def _check_targets(names: list[str], alerts: AlertsSpec, where: str) -> Iterator[Problem]:
    known = [CONSOLE, *alerts.targets]
    for name in names:
        if name not in known:
            what = f"there is no target {name!r}"
            yield _problem(what, where, f"known: {', '.join(known)}; add it under `targets`")


def _check_target(name: str, target: TargetSpec, where: str) -> Iterator[Problem]:
    ways = [way for way in ("webhook", "slack", "smtp") if getattr(target, way) is not None]
    if name == CONSOLE or len(ways) != 1:
        why = "is built in" if name == CONSOLE else f"is given {len(ways)} ways"
        yield _problem(f"target {name} {why}", where, "give one of webhook, slack and smtp")
        return
    for_mail = (target.sender, target.user, target.password)
    if target.smtp is None:
        if any(value is not None for value in for_mail) or target.recipients:
            yield _problem(f"target {name} has keys of a mail server", where, "add smtp: host:port")
        return
    host, _, port = target.smtp.rpartition(":")
    if not host or not port.isdigit():
        yield _problem(
            f"smtp {target.smtp!r} of target {name} has no port", where, "write it as mail.host:587"
        )
    if target.sender is None or not target.recipients:
        yield _problem(
            f"target {name} lacks an address", where, "add sender and recipients, a list"
        )
    if (target.user is None) != (target.password is None):
        yield _problem(f"target {name} logs in with half", where, "give user and password, or none")
    if target.password is not None and target.tls == "none":
        yield _problem(
            f"target {name} would send its password in clear", where, "use tls: starttls"
        )


def _problem(what: str, where: str, fix: str) -> Problem:
    return Problem(code="J016", what=what, where=where, fix=fix)


def check_plain(values: Any, where: Where, path: Place = ()) -> Iterator[Problem]:
    """`J013` for addresses and passwords that stand in a file. They are never shown.

    Args:
        values: What the file says under `alerts`, before anything else is made of it.
        where: As in `check_alerts`.
        path: Where in it the values are.
    """
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from check_plain(inner, where, (*path, str(key)))
    elif isinstance(values, list):
        for number, inner in enumerate(values):
            yield from check_plain(inner, where, (*path, number))
    elif values is not None and (path[:1] == ("targets",) or "to" in path[-2:]):
        is_secret = path[0] == "targets" and any(name in _SECRET for name in path[2:])
        if "://" in str(values) or (is_secret and not _ENV.fullmatch(str(values))):
            yield Problem(
                code="J013",
                what=f"`{path[-1]}` holds an address or a password itself, and a job is kept in "
                "the run's folder",
                where=where(path),
                fix="put it into an environment variable and write its name: env:MY_WEBHOOK",
            )

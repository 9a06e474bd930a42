"""Job files and plans judged: their mistakes, and what a job file is planned as.

Leaves out how a job is planned, which reads files and the catalog: the caller hands over the plan.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import INFO, WARNING, Fault
from paceline.errors import JobError, PacelineError, Problem
from paceline.job.job import ModelSpec
from paceline.job.length_rules import uncounted
from paceline.job.load import parse_job, parse_script
from paceline.plan import Plan, plan_from_json
from paceline.units import bytes_apart, counted

Planned = Plan | PacelineError | str | None
"""What a job is planned as, the refusal, or why it was not planned; None where nothing is to be
planned, or the planner refuses nothing and its estimates are of another machine."""

MOST_COMMUNICATION = 0.2
"""Share of a step that ranks may wait for each other without a word. A habit, no law: below 80 % of
linear scaling one looks for the reason."""

_WAITING = ("tensor", "context", "expert", "data", "stragglers")
"""Terms of a step's time in which ranks send or wait; a pipeline's are its bubble."""

_AGAIN = "plan the job again: paceline plan JOB --json"

_CAUTIONS: Mapping[str, tuple[str, Any, tuple[str, ...]]] = {
    "bubble": ("pipeline-bubble", WARNING, ("layout", "pipeline")),
    "tensor": ("plan-caution", WARNING, ("layout", "tensor")),
    "data parallel": ("model-parallel-needless", WARNING, ("layout",)),
    "checkpoint": ("plan-caution", WARNING, ("checkpoint", "every")),
    "gather": ("plan-caution", WARNING, ("layout", "sharding")),
}
"""A caution's subject -> id, level, and the key that it is about; others are hints."""


def is_plan(document: Marked) -> bool:
    """Whether a JSON mapping is a plan: it has what was chosen, and the case against the rest."""
    return all(
        document.at(key) is not None for key in ("cluster", "layout", "decisions", "rejected")
    )


def check_plan(document: Marked, text: str) -> Iterator[Fault]:
    """What the plan in a file says against itself, and what it allows and a person should know."""
    try:
        plan = plan_from_json(text.encode())
    except (msgspec.ValidationError, ValueError) as error:
        what = f"this version of Paceline cannot read the plan: {error}"
        yield Fault("plan-file", 1, what, _AGAIN, WARNING)
        return
    for keys, what, fix in _contradictions(plan):
        yield Fault("plan-file", _line(document, keys), what, fix)
    yield from _cautions(document, plan)


def check_planned(document: Marked, planned: Planned) -> Iterator[Fault]:
    """What the planner refuses of a job file, or cautions of."""
    if isinstance(planned, PacelineError):
        yield from map(_problem, planned.problems)
    elif isinstance(planned, Plan):
        yield from _cautions(document, planned)


def _problem(problem: Problem) -> Fault:
    """A problem of a job file, on the line that it names."""
    line = re.search(r"line (\d+)", problem.where)
    what = f"{problem.code}: {problem.what.partition(chr(10))[0]}"
    return Fault("job-file", int(line[1]) if line else 1, what, problem.fix)


def _cautions(document: Marked, plan: Plan) -> Iterator[Fault]:
    for caution in plan.cautions:
        id, level, keys = _CAUTIONS.get(caution.about, ("plan-caution", INFO, ()))
        yield Fault(id, _line(document, keys), caution.what, caution.fix, level)
    for limit in plan.limits:
        if limit.is_kept is False and limit.name != "memory":
            what = f"plan.{limit.name} is {limit.limit:g}, and {limit.expected:g} is expected"
            fix = f"raise plan.{limit.name}, or take fewer steps"
            yield Fault("plan-caution", _line(document, ("plan", limit.name)), what, fix)
    yield from _scaling(document, plan)


def _scaling(document: Marked, plan: Plan) -> Iterator[Fault]:
    """Ranks that wait for each other so long that far fewer would do nearly as much."""
    told = {each.about for each in plan.cautions}
    terms, step_s = plan.estimate.terms, plan.estimate.step_s
    waits = {name: terms.get(name, 0.0) for name in _WAITING if name not in told}
    if not step_s or sum(waits.values()) <= MOST_COMMUNICATION * step_s:
        return
    share, most = sum(waits.values()) / step_s, max(waits, key=waits.__getitem__)
    ranks = plan.cluster.num_ranks
    what = (
        f"ranks wait {share:.0%} of a step for each other, most of it for {most} (estimated): "
        f"{ranks} of them do the work of {ranks * (1 - share):.0f}"
    )
    fix = (
        "a larger train.global_batch, fewer ranks, or a faster network; "
        "`paceline bench --ranks` measures it"
    )
    yield Fault("scaling-not-linear", _line(document, ("cluster",)), what, fix)


def _contradictions(plan: Plan) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Keys, what contradicts, and the change. A plan as it was written has none."""
    layout, cluster = plan.layout, plan.cluster
    if layout.num_ranks != cluster.num_ranks:
        what = (
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context "
            f"{layout.context} is {counted(layout.num_ranks, 'rank')}, the cluster has "
            f"{cluster.num_ranks}"
        )
        yield ("layout",), what, _AGAIN
    for decision in plan.decisions:
        section, _, name = decision.field.partition(".")
        has = getattr(layout, name, None) if section == "layout" else None
        if isinstance(has, int) and decision.value.isdigit() and has != int(decision.value):
            what = (
                f"{decision.field} is {has}, and the plan decided {decision.value}: what it says "
            )
            yield (
                ("layout", name),
                f"{what}of time, memory and batch is of {decision.value}",
                _AGAIN,
            )
    needed, limit = plan.estimate.memory.known_bytes, plan.limit_bytes
    if needed > limit:
        sizes = f"{', and '.join(bytes_apart(needed, limit))} may be used"
        what = f"a rank needs {sizes} of {cluster.accelerator}"
        yield ("estimate", "memory"), what, _AGAIN
    blocks = sum(plan.stage_blocks)
    if blocks and blocks != plan.profile.num_blocks:
        what = f"the stages have {blocks} blocks, the model has {plan.profile.num_blocks}"
        yield ("stage_blocks",), what, _AGAIN
    heads = plan.decoder.heads if plan.decoder is not None else layout.tensor
    if heads % layout.tensor:
        what = f"tensor {layout.tensor} does not divide {heads} heads"
        yield ("layout", "tensor"), what, _AGAIN
    known = cluster.peak_flops_per_s
    if known and plan.precision not in known:
        what = f"precision is {plan.precision}, which {cluster.accelerator} does not have"
        yield ("precision",), what, f"one of {', '.join(known)}"


def _line(document: Marked, keys: tuple[str, ...]) -> int:
    """The line of a key, or of the nearest one above it that is there."""
    places = (document.at(*keys[:depth]) for depth in range(len(keys), 0, -1))
    return next((place.line for place in places if place is not None), 1)


_MODEL = {one.name for one in fields(ModelSpec)}
_OF_SCRIPT = ("processes", "recovery", "starts")
"""Keys beside `command` that others' files with a command at their top do not have."""


def is_job(document: Marked) -> bool:
    """Whether a YAML mapping is a job file: it says a model in our words, and how to train it; or a
    program to start, and how."""
    if document.at("apiVersion") is not None:
        return False
    command, model = document.at("command"), document.at("model")
    if command is not None and isinstance(command.value, list):
        return any(document.at(key) is not None for key in _OF_SCRIPT)
    if model is None or not isinstance(model.value, dict):
        return False
    return document.at("train") is not None and bool(_MODEL & set(model.value))


def check_job(path: str, text: str) -> Iterator[Fault]:
    """Every problem of the file, where it is."""
    try:
        if parse_script(text, source=path, folder=Path("/")) is None:
            parse_job(text, source=path, folder=Path("/"), count=uncounted)
    except JobError as error:
        yield from map(_problem, error.problems)

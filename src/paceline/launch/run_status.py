"""How a run stands, wherever it is: from its folder, and from the queue that has it.

Its parts are read without a word to the run itself, so any terminal may ask, as often as it likes.
"""

import shlex
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.alerts import is_firing
from paceline.errors import JobError, PacelineError, RunError
from paceline.launch.places import PLACES, Sight, queued
from paceline.launch.remote_jobs import naming_command
from paceline.plan import Plan
from paceline.record.events import AlertFired, read_events
from paceline.record.machines import newest_gpus
from paceline.record.metrics import read_metrics
from paceline.record.ownership import find_controller, machine
from paceline.record.pace import cost_of, pace_s
from paceline.record.placement import Placement, read_placement
from paceline.record.registry import run_folder
from paceline.record.run import RunFolder, open_run
from paceline.record.run_row import RunRow, read_row, running_since
from paceline.topology.read_use import GpuSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a run stands."""

    run: RunRow
    place: str
    """Name in the table of places."""

    job_id: str | None
    """The queue's id of it."""

    queue: Sight | None
    """What the queue says; None where there is none, or it does not answer."""

    queue_silent: str | None
    """Why the queue has said nothing."""

    hosts: dict[int, str]
    """Node -> host, at a place with hosts."""

    ran_s: float
    """For how long the run has had its machines, all starts together."""

    usd: float | None
    """What that has cost, by the catalog's price of the plan; None where no price is known."""

    usd_at_end: float | None
    """What it will have cost at the last step: at the newest pace, or as planned while there is no
    pace. None where no price is known, and once it is over."""

    usd_source: str | None
    """Whose price, and of which day."""

    mfu: float | None
    """Share of the ranks' peak that the newest steps used, as the plan counts it; None where the
    plan knows no peak."""

    mfu_planned: float | None
    left_s: float | None
    """Until the last step at the pace of the newest steps; None before there are some, and once it
    is over."""

    gpus: dict[str, GpuSample]
    """`node 0 GPU 1` -> its newest sample; empty where no GPU was sampled, and once the run is
    over."""

    alerts: list[dict[str, Any]]
    """Alerts that have fired and are not over: the events, as they are in events.jsonl."""

    num_fired: dict[str, int]
    """How often each alert rule has fired, by its name."""


def stand(named: str, runs: Path) -> Standing:
    """How a run stands.

    Raises:
        JobError: There is no such run.
    """
    run = find_run(named, runs)
    placement = read_placement(run.path)
    sight, silent = _ask_queue(placement)
    row = read_row(run.path)
    if sight is not None and row.state in ("new", "crashed"):
        # The folder knows of no controller now: what becomes of the run is the queue's to say.
        row = running_since(row) if sight.state == "running" else replace(row, state=sight.state)
    is_on = row.state == "running"
    events = read_events(run.events_file)
    ran_s = row.ran_s
    if sight is not None and sight.started_at is not None and not events:
        # The machines keep no record here: how long they ran is what the queue says.
        ran_s = max(0.0, (sight.ended_at or time.time()) - sight.started_at)
    lines = read_metrics(run.metrics_file)
    plan = _plan_of(run)
    pace = pace_s([line.at for line in lines], [line.generation for line in lines])
    left_s = None
    if is_on and row.num_steps and pace is not None:
        left_s = pace * max(0, row.num_steps - lines[-1].step)
    usd, usd_at_end, source = cost_of(plan, ran_s, left_s=left_s, is_on=is_on)
    return Standing(
        run=row,
        place=placement.place if placement is not None else "local",
        job_id=placement.job_id if placement is not None else None,
        queue=sight,
        queue_silent=silent,
        hosts=dict(placement.hosts) if placement is not None else {},
        ran_s=ran_s,
        usd=usd,
        usd_at_end=usd_at_end,
        usd_source=source,
        mfu=row.mfu,
        mfu_planned=plan.estimate.mfu if plan is not None else None,
        left_s=left_s,
        gpus=newest_gpus(run.path) if is_on else {},
        alerts=[msgspec.to_builtins(event) for event in is_firing(events)],
        num_fired=dict(Counter(event.rule for event in events if isinstance(event, AlertFired))),
    )


def find_run(named: str, runs: Path) -> RunFolder:
    """A run by its folder, by its name in the folder of all runs, or by a queue's id of it.

    Raises:
        JobError: `W015`, there is none.
    """
    return open_run(run_folder(named, runs))


def stop(named: str, runs: Path) -> str:
    """Ask a run to save at the next step boundary and end; what was asked, for people.

    Raises:
        JobError: `W015`, there is no such run; `W016`, its controller is not reached from here.
        RunError: Its queue cannot be asked.
    """
    run = find_run(named, runs)
    placement = read_placement(run.path)
    if placement is not None and placement.job_id is not None:
        with naming_command(placement, "stop"):
            queued(placement.place).cancel(placement)
        return f"job {placement.job_id} was asked to end"
    controller = find_controller(run.path)
    if controller is None or read_row(run.path).state != "running":
        raise JobError.of(
            code="W016",
            what="the run is not running",
            where=str(run.path),
            fix=f"see how it ended: paceline status {run.path}",
        )
    if controller.machine != machine():
        raise JobError.of(
            code="W016",
            what=f"the run's controller is on another machine, at {controller.host}",
            where=str(run.path),
            fix=f"paceline stop {controller.host}:{shlex.quote(str(run.path.absolute()))} asks "
            "it over ssh; or run `paceline stop` there",
        )
    try:
        if controller.interrupt():
            return f"the controller (process {controller.pid}) was asked to end the run"
    except PermissionError:
        raise JobError.of(
            code="W016",
            what=f"the run belongs to another user: process {controller.pid}",
            where=str(run.path),
            fix="ask that user to stop it",
        ) from None
    raise RunError.of(
        code="W016",
        what="the run has no controller now; its workers save and end by themselves after "
        "recovery.lease",
        where=str(run.path),
        fix=f"take it over and stop it: paceline run --resume {run.path}, then Ctrl-C",
    )


def _plan_of(run: RunFolder) -> Plan | None:
    try:
        return run.plan() if run.plan_file.exists() else None
    except JobError:
        return None


def _ask_queue(placement: Placement | None) -> tuple[Sight | None, str | None]:
    if placement is None or placement.job_id is None or placement.place not in PLACES:
        return None, None
    try:
        with naming_command(placement, "status"):
            return queued(placement.place).look(placement), None
    except PacelineError as error:
        problem = error.problems[0]
        return None, f"{problem.code}: {problem.what}; {problem.fix}"

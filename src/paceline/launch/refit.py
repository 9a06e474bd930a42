"""What a run does that is out of memory: resume in the next layout that needs less, or name it.

Leaves out which layouts need less (`plan/refit.py`).
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.control.state import Failure, State
from paceline.errors import PacelineError
from paceline.job import Job
from paceline.launch.plannable import planned
from paceline.plan import Plan
from paceline.plan.refit import Refit, next_fit, settings_of
from paceline.record.events import (
    AnyEvent,
    FaultInjected,
    PlanChanged,
    RunFinished,
    RunStarted,
    WorkerLost,
    event_log,
    read_events,
)
from paceline.record.run import RunFolder, open_run
from paceline.units import format_bytes


def refit(
    job: Job,
    plan: Plan,
    run: RunFolder,
    state: State,
    make_plan: Callable[[Job], Plan],
    on_event: Callable[[AnyEvent], None],
) -> Refit | None:
    """The job and plan that a run which is out of memory resumes with; None where it is over.

    What changes is in the run's events. Where the run is over for want of memory, `state.reason`
    gets the setting that needs less, or the settings that were tried.

    Args:
        make_plan: The planner, and whatever else may refuse a job.
    """
    events = read_events(run.events_file)
    lost = next((each for each in reversed(events) if isinstance(each, WorkerLost)), None)
    is_cause = lost is not None and f"rank {lost.rank}: {lost.how}" in (state.reason or "")
    if state.outcome != "failed" or lost is None or not is_cause or lost.cause != "out of memory":
        return None
    if job.spec.recovery.on_oom == "stop":
        advice = _advice(job, plan, run, make_plan)
        state.reason = f"{state.reason}; {advice}"
        return None
    found = next_fit(job, plan, make_plan)
    if found is None:
        changed = [each for each in events if isinstance(each, PlanChanged)]
        tried = ", ".join(setting for each in changed for setting in each.settings) or "none"
        state.reason = f"{state.reason}; no layout that needs less memory is left; tried: {tried}"
        return None
    layout, log = found.plan.layout, event_log(run.events_file)
    event = PlanChanged(
        at=time.time(),
        generation=events[-1].generation,
        settings=found.settings,
        layout=layout.name,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        global_batch=layout.global_batch,
        reason=f"rank {lost.rank} ran out of memory after step {lost.last_step}",
    )
    log.write(event)
    log.close()
    on_event(event)
    return found


def failure_before(events: Sequence[AnyEvent]) -> Failure | None:
    """The loss that a run recovers from by resuming in another layout; None where it is none.

    Its `Recovered` then has the time from that loss to the next finished step, like any other's.
    """
    if not events or not isinstance(events[-1], PlanChanged):
        return None
    lost = next(each for each in reversed(events) if isinstance(each, WorkerLost))
    ended = next(each for each in reversed(events) if isinstance(each, RunFinished))
    injected = [e.at for e in events if isinstance(e, FaultInjected) and e.pid == lost.pid]
    to_monotonic = time.monotonic() - time.time()
    return Failure(
        rank=lost.rank,
        how=lost.how,
        happened_at=injected[-1] + to_monotonic if injected else None,
        known_at=lost.at + to_monotonic,
        after_step=ended.step,
    )


REFITTED = "recovery.on_oom: refit resumed the run with "
"""How the advice of a run begins that changed its layout by itself."""


def advice_of_run(name: str, runs: Path) -> str | None:
    """The command that resumes a run in less memory, or what it resumed with by itself; None where
    the name is no run of a job, or the run has been resumed since."""
    folder = Path(name) if os.path.lexists(name) else runs / name
    if not (folder / "run.json").exists():
        return None
    try:
        run = open_run(folder)
        job, plan, events = run.job(), run.plan(), read_events(run.events_file)
    except PacelineError:
        return None
    lost = [isinstance(e, WorkerLost) and e.cause == "out of memory" for e in events]
    since = events[len(lost) - lost[::-1].index(True) :] if True in lost else []
    changed = [setting for e in since if isinstance(e, PlanChanged) for setting in e.settings]
    if changed:
        return f"{REFITTED}{', '.join(changed)}"
    if any(isinstance(each, RunStarted) for each in since):
        return None  # in the layout that the job had then, which is not the one that failed
    return _advice(job, plan, run, planned)


def _advice(job: Job, plan: Plan, run: RunFolder, make_plan: Callable[[Job], Plan]) -> str:
    found = next_fit(job, plan, make_plan)
    if found is None:
        return "no layout that needs less memory is possible on these ranks"
    before, after = plan.estimate.memory, found.plan.estimate.memory
    options = " ".join(f"--set {each}" for each in settings_of(found, job, make_plan))
    return (
        f"`{options}` with `paceline run --resume {run.path}` needs about "
        f"{format_bytes(after.known_bytes)} a rank instead of {format_bytes(before.known_bytes)} "
        "(estimated); recovery.on_oom: refit does so by itself"
    )

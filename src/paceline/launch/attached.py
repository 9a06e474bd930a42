"""Run a job to its end with the controller in this command, wherever its agents are."""

import asyncio
import contextlib
import importlib.metadata
import platform
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import paceline
from paceline.control.controller import MARGIN_S, Controller, Progress
from paceline.control.failover import Memory, replay, snapshot
from paceline.control.journal import Journal
from paceline.control.network import bound_socket
from paceline.control.state import Setup, State
from paceline.errors import JobError
from paceline.job import Job, dump_job
from paceline.job.train_rules import other_training
from paceline.launch.foreground import Force, supervise
from paceline.launch.judge_alerts import Alarms, stamped
from paceline.launch.places import Inspection, Site, attached
from paceline.launch.ready import check_can_run
from paceline.launch.refit import failure_before
from paceline.launch.sinks.run_sinks import sinks_beside
from paceline.parallel.rank_map import peers_of
from paceline.parallel.shrink import rounding_bound
from paceline.plan import Plan, is_deterministic
from paceline.plan.case import case_of_plan
from paceline.plan.lost_node import fewest_ranks
from paceline.record.events import (
    AnyEvent,
    BatchSkipped,
    EventLog,
    ExactnessChanged,
    FaultInjected,
    RunFinished,
    event_log,
    read_events,
)
from paceline.record.history import Event, History
from paceline.record.ownership import (
    InCharge,
    claim_control,
    claim_from_another,
    find_controller,
    hold_agents,
    hold_alone,
    is_held,
    machine,
    publish_controller,
)
from paceline.record.run import RunFolder, check_steps_left, write_resolved
from paceline.record.run_files import RunFiles
from paceline.record.starts import keep_start

UNIT_ROUNDOFF = {
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-4,
}
"""Unit roundoff of the matrix multiplications. Source: IEEE 754 and the formats' definitions; fp8
is E4M3."""

_FILE_SERVER_S = 90.0
"""After which an NFS server forgets the locks of a client that is gone: the lease time of Linux's
nfsd (`/proc/fs/nfsd/nfsv4leasetime`)."""

_PATIENCE_S = 5.0
"""How long to wait for what is left of the run's last controller. A guess: a step and a save."""


def run_attached(
    job: Job,
    plan: Plan,
    run: RunFolder,
    *,
    place: str = "local",
    inspection: Inspection | None = None,
    on_event: Callable[[AnyEvent], None] = lambda event: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> State:
    """Run a job to its end, its controller being this command, and say how it ended.

    Args:
        inspection: How its machines are looked at before anything is started there; those of a run
            that is taken over are not, as it goes on.
        on_event: Told of every event after it is in the log.
        on_progress: Told of everything a worker says.
        on_note: Told of what is done about machines, and about a controller that does not answer.

    Raises:
        KeyboardInterrupt: Asked to stop twice while the controller did not answer.
        JobError: The place cannot run it, another process runs it already, or has finished it
            meanwhile.
    """
    JobError.raise_for(check_can_run(job, plan, place=place))
    is_here = _was_here(run)
    patience_s = _PATIENCE_S if is_here else _patience_afar_s(job)
    if not is_here and is_held(run.path):
        on_note(f"what is left of the run on another machine has {patience_s:.0f} s to end")
    claim = claim_from_another(
        run.path,
        patience_s=patience_s,
        is_over=lambda since_s: _is_over(run, since_s),
        is_here=is_here,
        on_wait=lambda: on_note("waiting for the command that had the run to end"),
    )
    # Sinks are waited for when the run is over and no longer held.
    with contextlib.ExitStack() as sinks, claim:
        lock, takes_over = _hold(job, run)
        if not takes_over:
            check_steps_left(run, job, meanwhile=True)
            keep_start(run.path, job.folder)
        with lock:
            site = attached(place).open_site(
                job, plan, run, on_note, None if takes_over else inspection
            )
            with _listen(run, site.address) as listener:
                post = _Post(job, plan, run, lock, listener, site)
                sinks.enter_context(sinks_beside(run.path, job.spec.metrics, on_note))
                return supervise(
                    post.serve,
                    takes_over=takes_over,
                    on_event=on_event,
                    on_progress=on_progress,
                    on_note=on_note,
                    force=Force(lease_s=job.spec.recovery.lease, end_agents=site.end_by_force),
                )


def can_take_over(run: RunFolder) -> bool:
    """Whether the run goes on, or waits for its end, without a controller."""
    if not run.journal_file.exists():
        return False
    try:
        claim_control(run.path, patience_s=0.0).close()
    except JobError:
        return False
    return is_held(run.path)


def _is_over(run: RunFolder, since_s: float) -> bool:
    """Whether the run's end was recorded after this time (unix)."""
    ends = [event.at for event in read_events(run.events_file) if isinstance(event, RunFinished)]
    return bool(ends) and ends[-1] > since_s


def _hold(job: Job, run: RunFolder) -> tuple[IO[bytes], bool]:
    """What agents hold the run by, and whether there are some of a controller that died."""
    try:
        return hold_alone(run.path, patience_s=0.0), False
    except JobError:
        if not _was_here(run):
            # What it knew is in times of another machine. Its agents end when their lease is over.
            return hold_alone(run.path, patience_s=_patience_afar_s(job)), False
        is_same = run.job_file.read_bytes() == dump_job(job.spec).encode()
        if is_same and run.journal_file.exists():
            return hold_agents(run.path), True
        return hold_alone(run.path, patience_s=_PATIENCE_S), False


def _was_here(run: RunFolder) -> bool:
    last = find_controller(run.path)
    return last is None or last.machine in ("", machine())


def _patience_afar_s(job: Job) -> float:
    """Until the agents of a controller on another machine, which may be lost, have ended, and a
    file server has let go of the locks of that machine."""
    recovery = job.spec.recovery
    return recovery.lease + recovery.grace + MARGIN_S + _FILE_SERVER_S


def _listen(run: RunFolder, host: str) -> socket.socket:
    """Where agents connect; where the last controller was, if that is free."""
    last = find_controller(run.path)
    before = last.port if last is not None and last.host == host else 0
    for port in dict.fromkeys((before, 0)):
        try:
            listener = bound_socket(host, port)
        except OSError:
            continue
        listener.listen(4096)
        listener.setblocking(False)
        return listener
    raise JobError.of(
        code="W003",
        what=f"the controller cannot listen on {host}",
        where="address of this machine",
        fix="give an address that this machine has",
    )


@dataclass(frozen=True, slots=True)
class _Post:
    """What every controller of a run is given, one after the other."""

    job: Job
    plan: Plan
    run: RunFolder
    lock: IO[bytes]
    listener: socket.socket
    site: Site

    def serve(
        self,
        takes_over: bool,
        on_event: Callable[[AnyEvent], None],
        on_progress: Callable[[Progress], None],
        on_beat: Callable[[bool], None],
    ) -> State:
        """Control the run to its end."""
        events = event_log(self.run.events_file)
        journal = Journal(self.run.journal_file)
        agents = self.site.agents(self.lock)
        memory = self._take_over(events, journal, on_event) if takes_over else self._begin(journal)
        host, port = self.listener.getsockname()[:2]
        epoch = memory.state.epoch + takes_over
        publish_controller(self.run.path, InCharge.here(epoch=epoch, host=host, port=port))
        controller = Controller(
            memory=memory,
            journal=journal,
            listener=self.listener,
            events=events,
            agents=agents,
            lease_s=self.job.spec.recovery.lease,
            on_event=on_event,
            on_progress=on_progress,
            on_beat=on_beat,
        )
        alarms = Alarms(
            self.run.path, self.job.spec.name, self.job.spec.alerts, self.plan, controller.report
        )
        alarms.start()
        try:
            return asyncio.run(controller.run())
        finally:
            agents.end()
            alarms.close()
            unrecorded = controller.take_unrecorded()
            for event in stamped(unrecorded, controller.state.generation):
                events.write(event)
                on_event(event)
            events.close()
            journal.close()

    def _begin(self, journal: Journal) -> Memory:
        before = read_events(self.run.events_file)
        history = History(is_script=False)
        for event in RunFiles(self.run.path).events():
            history.add(event)
        other = (
            other_training(self.run.job().spec, self.job.spec, history.checkpoint_step or 0)
            if before
            else []
        )
        write_resolved(self.run, self.job.spec, self.plan)
        fired = Counter(event.fault for event in before if isinstance(event, FaultInjected))
        state = State(
            setup=_setup(self.job, self.plan, before, history, other),
            faults=_left(self.job.spec.drill.all_faults, fired),
            failure=failure_before(before),
        )
        memory = Memory(state=state, token=secrets.token_hex(16), lines_before=len(before))
        journal.begin(snapshot(memory))
        return memory

    def _take_over(
        self, events: EventLog, journal: Journal, on_event: Callable[[AnyEvent], None]
    ) -> Memory:
        replayed = replay(self.run.journal_file)
        journal.go_on()
        memory = replayed.memory
        num_written = len(read_events(self.run.events_file)) - memory.lines_before
        for event in replayed.events[max(0, num_written - replayed.events_before) :]:
            events.write(event)
            on_event(event)
        return memory


def _setup(
    job: Job, plan: Plan, before: list[AnyEvent], history: History, other: Sequence[str] = ()
) -> Setup:
    """What the controller works by.

    Args:
        other: See `other_training`.
    """
    layout, arithmetic, train = plan.layout.name, _arithmetic(plan), job.spec.train
    tolerance = rounding_bound(plan.layout.global_batch, UNIT_ROUNDOFF[plan.precision])
    changes = []
    if difference := history.difference(arithmetic):
        changes.append(
            ExactnessChanged(exactness="numeric", reason=difference, tolerance=tolerance)
        )
    if other:
        changes.append(
            ExactnessChanged(exactness="different", reason=", ".join(other), tolerance=None)
        )
    history.add(Event(event="RunStarted", layout=layout, arithmetic=arithmetic))
    for change in changes:
        history.add(Event(event="ExactnessChanged", exactness=change.exactness))
    return Setup(
        num_nodes=plan.cluster.num_nodes,
        ranks_per_node=plan.cluster.ranks_per_node,
        num_steps=job.spec.train.steps,
        max_restarts=job.spec.recovery.max_restarts,
        grace_s=job.spec.recovery.grace,
        versions=versions(),
        resumed=bool(before),
        first_generation=max((event.generation for event in before), default=0) + 1,
        layout=layout,
        num_spares=_num_spares(job, plan),
        heartbeat_s=job.spec.recovery.heartbeat,
        in_order=plan.layout.pipeline == 1,
        peers=peers_of(plan.layout),
        evict_stragglers=job.spec.recovery.evict_stragglers,
        split=plan.layout,
        shrink=job.spec.recovery.shrink,
        least_ranks=fewest_ranks(job.spec, plan.layout, case_of_plan(plan)),
        batch=job.spec.recovery.batch,
        replace_timeout_s=job.spec.recovery.replace_timeout,
        tolerance=tolerance,
        arithmetic=arithmetic,
        changes=tuple(changes),
        errors_from=train.powersgd_start if train.gradient_compression == "powersgd" else None,
        exactness=history.exactness(is_deterministic=is_deterministic(job, plan)),
        on_oom=job.spec.recovery.on_oom,
        poison=job.spec.recovery.poison,
        node_strikes=job.spec.recovery.node_strikes,
        strike_window_s=job.spec.recovery.strike_window,
        skipped=tuple(
            (event.step, tuple(event.samples))
            for event in before
            if isinstance(event, BatchSkipped)
        ),
    )


def _left(faults: Iterable[str], fired: Counter[str]) -> tuple[str, ...]:
    """Faults that have not happened yet; each counts as often as it was asked for."""
    left = []
    for fault in faults:
        if fired[fault]:
            fired[fault] -= 1
        else:
            left.append(fault)
    return tuple(left)


def _arithmetic(plan: Plan) -> dict[str, Any]:
    """See `RunStarted.arithmetic`. Recomputed activations are the same bits."""
    layout = {
        f"layout.{name}": value
        for name, value in asdict(plan.layout).items()
        if not name.startswith("recompute")
    }
    return layout | {
        "precision": plan.precision,
        "accelerator": plan.cluster.accelerator,
        "torch": versions().get("torch"),
    }


def _num_spares(job: Job, plan: Plan) -> int:
    """One warm spare, unless there is nobody whose place it could take while others live on."""
    asked = job.spec.recovery.spares
    return asked if asked != "auto" else int(plan.layout.num_ranks > 1)


def versions() -> dict[str, str]:
    """Versions of Paceline, Python and, where it is installed, torch."""
    versions = {"paceline": paceline.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions

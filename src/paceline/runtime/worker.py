"""A worker's process: take a rank, run the training function, leave a completion record.

    python -m paceline.runtime.worker --run DIR ...     (the agent's fork server starts it)

When another worker is lost, or this one's program raises, the process lives on: it leaves the
process groups, keeps model and optimizer, and calls the training function again once it has a place
in the next generation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from paceline.control import messages as say
from paceline.control.error_texts import names_lost_peer
from paceline.control.parent import die_with_parent
from paceline.control.policy import cause_of
from paceline.control.slots import Phase
from paceline.errors import JobError, PacelineError, RunError
from paceline.record.run import open_run
from paceline.runtime.channel import Channel
from paceline.runtime.progress import Progress, open_progress

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.runtime.session import Session


_NOTICE_S = 0.3
"""How long an error of its own may turn out to be the echo of another rank's loss. A guess: the
controller's word of that takes milliseconds."""


@dataclass(frozen=True, slots=True)
class _Options:
    run: Path
    channel: int
    parent: int
    slot: int | None


def main() -> NoReturn:
    """Entry point of the worker's process; never returns and never raises."""
    options = _parse(sys.argv[1:])
    die_with_parent(options.parent)
    progress = open_progress(options.slot)
    progress.begin(0)
    progress.watch()
    progress.enter(Phase.IMPORTING)
    channel = Channel(options.channel)
    channel.open()
    _stop_on_signals(channel)
    pid = os.getpid()
    try:
        _work(options, channel, progress)
    except SystemExit as end:
        _leave(0 if end.code is None else int(end.code) if isinstance(end.code, int) else 1)
    except BaseException as error:  # noqa: BLE001
        # The edge of the process: whatever it was goes into this log and to the controller, in
        # that order, as the controller ends this process as soon as it hears of it.
        _log(error)
        if os.getpid() == pid:  # a forked child of the program's speaks for nobody
            channel.send(_last_words(error))
        _leave(1)
    _leave(0)


def _work(options: _Options, channel: Channel, progress: Progress) -> None:
    from paceline.plan import is_deterministic
    from paceline.runtime.determinism import set_deterministic
    from paceline.runtime.devices import DEVICES
    from paceline.runtime.recovery.groups import Groups
    from paceline.runtime.recovery.member import Member
    from paceline.runtime.session import Session

    run = open_run(options.run)
    job, plan = run.job(), run.plan()
    set_deterministic(is_deterministic(job, plan))
    groups = Groups(
        backend=DEVICES[plan.cluster.backend].transports,
        listener=_listener(job, channel),
        limit_s=job.spec.recovery.collective_timeout,
    )
    channel.on_interrupt, channel.on_abort = groups.interrupt, groups.abort
    channel.leaves_at_once = DEVICES[plan.cluster.backend].transports == "gloo"
    if not channel.leaves_at_once:
        groups.watch(lambda reason: channel.send(say.PeerLost(reason=reason)))
    channel.collectives = groups.collectives
    channel.after_report = partial(groups.keep_dump, run.logs)
    member = Member(
        channel=channel, groups=groups, run=run, backend=plan.cluster.backend, progress=progress
    )
    session = Session(
        job=job, plan=plan, run=run, channel=channel, member=member, progress=progress
    )
    progress.tell_of_compiling()
    program = _program(job)
    while not _finish(program, session, channel):
        # What refers to itself (modules, hooks, the error's frames) holds old process groups, with
        # their sockets and threads. Some milliseconds, as what was imported is frozen.
        gc.collect()


def _finish(program: Callable[[Session], None], session: Session, channel: Channel) -> bool:
    pid = os.getpid()
    try:
        program(session)
        session.complete()
        session.progress.enter(Phase.PARKED)
        if channel.wait_for_exit():
            return True
        _park(session, channel)
    except BaseException as error:  # of the program; told, and tried again
        if os.getpid() != pid or isinstance(error, SystemExit):
            raise
        if not _may_go_on(error, session, channel):
            raise
    return False


def _may_go_on(error: BaseException, session: Session, channel: Channel) -> bool:
    """Park after an error that is only the echo of another rank's loss, or that another try may
    get over; False for one that ends this process."""
    from paceline.runtime.recovery.held import Regrouping, StartOver

    if isinstance(error, StartOver):
        return True
    if isinstance(error, Regrouping):
        session.park(planned=True)
        return True
    if session.generation == 0:
        return False
    lost_peer = names_lost_peer(str(error))
    if not channel.wait_for_interrupt(0.0 if lost_peer else _NOTICE_S):
        words = _last_words(error, session)
        if lost_peer:
            channel.send(say.PeerLost(reason=words.message))
        elif words.parks:
            _log(error)
            channel.send(words)
        else:
            return False
    _park(session, channel)
    return True


def _park(session: Session, channel: Channel) -> None:
    """Leave this generation once every rank knows that it is over: what one rank aborts can
    complete another's collective, with garbage (`control/interrupting.py`)."""
    session.progress.interrupted()
    channel.wait_for_abort()
    session.park()


def _log(error: BaseException) -> None:
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.flush()


def _parse(arguments: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(prog="paceline-worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    for name in ("channel", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--slot", type=int, help="descriptor of this worker's slot")
    options = parser.parse_args(arguments)
    return _Options(options.run, options.channel, options.parent, options.slot)


def _listener(job: Job, channel: Channel) -> socket.socket:
    """The socket of this worker's store. A port that was asked for is the first worker's."""
    from paceline.runtime.recovery.groups import listen_for_store

    asked = job.spec.cluster.rendezvous_port
    port = asked if asked != "auto" and os.environ.get("RANK") == "0" else 0
    host = os.environ.get("PACELINE_HOST", "127.0.0.1")
    try:
        return listen_for_store(port, host)
    except OSError as error:
        raise JobError.of(
            code="R012",
            what=f"port {port} cannot be used on {host}: {error.strerror}",
            where=job.where("cluster.rendezvous_port"),
            fix="leave it out to take a free port, or end the program that holds it",
        ) from None


def _program(job: Job) -> Callable[[Session], None]:
    """The training function: the job's own, or the built-in language-model trainer."""
    name = job.spec.program
    if name is None:
        from paceline.runtime.language_model import train

        return train
    from paceline.runtime.models import import_named

    module = name.partition(":")[0]
    try:
        found: Callable[[Session], None] = import_named(job.folder, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise JobError.of(
            code="R023",
            what=f"{name} cannot be imported: {error}",
            where=job.where("program"),
            fix=f"write it as module:function, with {module}.py in {job.folder}",
        ) from error
    return found


def _stop_on_signals(channel: Channel) -> None:
    """SIGINT to any worker stops the whole run at the next step boundary. SIGTERM is the machine's
    word that it takes this process away: the controller decides what to do about that."""

    def stop(number: int, frame: FrameType | None) -> None:
        channel.ask_to_stop()

    def leave(number: int, frame: FrameType | None) -> None:
        # In a thread of its own, as this one may be in the middle of saying something.
        threading.Thread(target=channel.send, args=(say.LeaveWanted(),), daemon=True).start()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, stop)


_BROKEN = ("accelerator", "out of memory")
"""Causes that a process does not get over: the accelerator's context is lost, or memory is full."""


def _last_words(error: BaseException, session: Session | None = None) -> say.Crashed:
    text, kind = str(error), type(error).__name__
    if isinstance(error, PacelineError) and error.problems:  # a code is what the reader can look up
        kind = error.problems[0].code
        text = text.removeprefix(f"{kind}: ")
    text = _printable(text)
    frames = traceback.format_exception(error)[-6:]
    needs_a_person = isinstance(error, PacelineError | ImportError | SyntaxError)
    is_broken = cause_of(f"{kind}: {text}") in _BROKEN
    retry = not needs_a_person
    return say.Crashed(
        kind=kind,
        message=text[:2000],
        where=_printable("".join(frames))[-4000:],
        retry=retry,
        parks=retry and not is_broken and session is not None,
        step=session.step_at if session is not None else None,
        samples=session.samples_at if session is not None else [],
        exit_code=error.exit_code if isinstance(error, PacelineError) else RunError.exit_code,
    )


def _printable(text: str) -> str:
    """Without what UTF-8 cannot express, such as half of a surrogate pair in a file's name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

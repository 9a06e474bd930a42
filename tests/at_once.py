"""Files of tests at once, in forks of the process that has collected them: `--at-once 4`.

Reading 400 files of tests, torch and transformers takes 11 s of a core, and longer in a new clone:
it is done once, where processes of `pytest -n` each do it. A fork takes the next file when it is
through with one, and what its tests report is shown by the first process.
"""

import atexit
import gc
import itertools
import os
import pickle
import random
import selectors
import signal
import struct
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import BinaryIO

import pytest

_NUMBER = struct.Struct("<H")


class _Node(SimpleNamespace):
    """How a report shows that others come between it and the next: pytest-xdist's mark."""

    __hash__ = object.__hash__


@dataclass(eq=False)
class _Fork:
    number: int
    pid: int
    lines: BinaryIO
    file: int | None = None
    """Place of the file it has taken."""

    ended: set[str] = field(default_factory=set)
    """Tests of it that are through."""

    has_said_all: bool = False


def run(session: pytest.Session, count: int) -> bool:
    """Run what has been collected in `count` forks, a file at a time in its order.

    Raises:
        pytest.Session.Failed: As many tests as `--maxfail` have failed.
    """
    files = [list(of) for _, of in itertools.groupby(session.items, key=lambda each: each.path)]
    take, put = os.pipe()
    os.write(put, b"".join(_NUMBER.pack(place) for place in range(len(files))))
    os.close(put)
    session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    session.config._tmp_path_factory.getbasetemp()  # those of the forks lie in it
    gc.collect()
    gc.freeze()
    numbers = itertools.count()
    forks = [_fork(session, files, take, next(numbers)) for _ in range(min(count, len(files)))]
    try:
        with selectors.DefaultSelector() as ready:
            for fork in forks:
                ready.register(fork.lines, selectors.EVENT_READ, fork)
            while ready.get_map():
                for key, _ in ready.select():
                    fork = key.data
                    if _hear(session, fork):
                        continue
                    ready.unregister(fork.lines)
                    if not _end(session, fork, files):
                        forks.append(_fork(session, files, take, next(numbers)))
                        ready.register(forks[-1].lines, selectors.EVENT_READ, forks[-1])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for fork in forks:
            if not fork.lines.closed:
                os.kill(fork.pid, signal.SIGTERM)
                fork.lines.close()
                os.waitpid(fork.pid, 0)
        os.close(take)
    return True


def _fork(session: pytest.Session, files: list[list[pytest.Item]], take: int, number: int) -> _Fork:
    lines, line = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(line)
        return _Fork(number, pid, os.fdopen(lines, "rb"))
    code = 1
    try:
        os.close(lines)
        with os.fdopen(line, "wb") as out:
            _work(session, files, take, number, out)
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Reporter:
    """Sends what happens to the first process, which shows it."""

    def __init__(self, config: pytest.Config, out: BinaryIO) -> None:
        self._config = config
        self._out = out

    def send(self, kind: str, what: object = None) -> None:
        pickle.dump((kind, what), self._out)
        self._out.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.send("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self.send("end", (nodeid, location))


def _work(
    session: pytest.Session,
    files: list[list[pytest.Item]],
    take: int,
    number: int,
    out: BinaryIO,
) -> None:
    """In a fork: every file that it gets, then what it has registered for its end."""
    config = session.config
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()  # the first process's own
    random.seed()
    config.pluginmanager.unregister(name="terminalreporter")
    reporter = _Reporter(config, out)
    config.pluginmanager.register(reporter)
    config.pluginmanager.getplugin("capturemanager").start_global_capturing()
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / f"fork-{number}"
    folders._basetemp.mkdir()
    while taken := os.read(take, _NUMBER.size):
        (place,) = _NUMBER.unpack(taken)
        reporter.send("file", place)
        for item, following in itertools.pairwise([*files[place], None]):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    atexit._run_exitfuncs()
    reporter.send("all")


def _hear(session: pytest.Session, fork: _Fork) -> bool:
    """Take one word of a fork; whether there was one."""
    try:
        kind, what = pickle.load(fork.lines)
    except (EOFError, pickle.UnpicklingError):
        return False
    hook, config = session.config.hook, session.config
    if kind == "file":
        fork.file, fork.ended = what, set()
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=config, data=what)
        name = f"fork {fork.number}"
        report.node = _Node(gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]")
        hook.pytest_runtest_logreport(report=report)
    elif kind == "end":
        fork.ended.add(what[0])
        hook.pytest_runtest_logfinish(nodeid=what[0], location=what[1])
    else:
        fork.has_said_all = True
    return True


def _end(session: pytest.Session, fork: _Fork, files: list[list[pytest.Item]]) -> bool:
    """A fork has ended; whether it was through. What it had left of its file has failed."""
    fork.lines.close()
    _, status = os.waitpid(fork.pid, 0)
    if fork.has_said_all:
        return True
    why = f"the process of these tests ended with {os.waitstatus_to_exitcode(status)}"
    for item in files[fork.file or 0]:
        if item.nodeid not in fork.ended:
            call = pytest.CallInfo.from_call(lambda: pytest.fail(why, pytrace=False), "call")
            report = pytest.TestReport.from_item_and_call(item, call)
            session.config.hook.pytest_runtest_logreport(report=report)
    return False

"""Programs as forks of a process that has imported what they import: two seconds of a core less for
each that imports torch, half a second less for each command.

One process for all of a session's tests imports torch, another what the command imports, and
neither a fork nor what it forks takes apart at its end what was imported (a quarter of a second).
The interpreter that is started for a program with torch stands in for the fork: it hands over its
arguments, environment, folder and open files, passes signals on, and ends as the fork ends. If it
dies the fork is killed. `tests/command.py` asks for commands, and starts no interpreter.

Tests that repeat others do without the first (`./test --ranks`, as in CI): there every program that
imports torch is started as people start it. What differs: the fork has a process id, a group and a
session of its own, and the hashes of strings of all others.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

_MAX_BYTES = 1 << 20
"""Of a request: an environment and some words."""

_STARTS_S = 300.0
"""It takes three seconds, and others are at work."""

_READ_AT_START = ("KMP_", "LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH", "TORCH")
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_FR_", "TORCH_NCCL_")
"""Beginnings of variables that count when Python starts or torch is imported: there is a warm
process for each set of values of the first that are none of the second. OFF is torch's default."""

_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_FROM = 200
"""Number from which on files are kept until their own numbers are free."""

_OF_PROGRAMS = (
    *("paceline.control.agent", "paceline.prove.prove", "paceline.runtime.language_model"),
    "paceline.runtime.worker",
)
_OF_COMMANDS = (
    *("paceline.control.controller", "paceline.launch.places", "paceline.launch.preflight"),
    *("paceline.launch.local", "paceline.plan", "paceline.render", "paceline.record.run"),
)
COMMAND = "command"
"""Key of the warm process of commands, which has no torch."""


def is_as_usual() -> bool:
    """Whether this process has the session's namespaces, control groups, limits and processors, as
    a fork of the warm process has."""
    _, owner = _session()
    try:
        return _surroundings(owner) == _surroundings(str(os.getpid()))
    except OSError:  # the session is over
        return False


def _surroundings(pid: str) -> tuple[object, ...]:
    process = Path("/proc", pid)
    spaces = sorted((each.name, os.readlink(each)) for each in (process / "ns").iterdir())
    texts = ((process / name).read_text() for name in ("cgroup", "limits"))
    return (spaces, *texts, os.sched_getaffinity(int(pid)))


def _session() -> list[str]:
    """Its folder and the id of its first process."""
    return os.environ["PACELINE_TESTS_SESSION"].rsplit(":", 1)


def stand_in() -> None:
    """For the program that this interpreter was to run. Returns where torch cannot be imported."""
    line = line_to(_key())
    if line is None:
        return
    files = [each for each in range(_FROM) if _is_inherited(each)]
    ignored = [n for n in _PASSED_ON if signal.getsignal(n) == signal.SIG_IGN]
    for number in set(_PASSED_ON) - set(ignored):
        signal.signal(number, lambda number, frame: line.send(str(number).encode()) and None)
    ask(
        *(line, sys.orig_argv[2:], dict(zip(files, files, strict=True))),
        path=[os.getcwd(), *sys.path],
        ignored=ignored,
        parent=os.getppid(),
    )
    for each in files:
        os.close(each)
    status = int(line.recv(64) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def ask(
    line: socket.socket,
    words: Iterable[str],
    files: dict[int, int],
    *,
    folder: str | None = None,
    environment: dict[str, str] | None = None,
    path: list[str] | None = None,
    ignored: Iterable[int] = (),
    parent: int | None = None,
) -> None:
    """Ask a warm process for the fork that runs a module, or the command, with its arguments.

    Its exit code comes over the line, which takes numbers of signals before. The fork is killed
    when the line is closed.

    Args:
        files: Open files, by the number that each has there.
        path: `sys.path`; without it the folder before the warm process's own.
    """
    request = {
        "words": list(words),
        "environment": environment or dict(os.environ),
        "path": path,
        "folder": folder or os.getcwd(),
        "files": list(files),
        "ignored": list(ignored),
        "parent": parent or os.getpid(),
    }
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    socket.send_fds(line, [json.dumps(request).encode()], list(files.values()))


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def _key() -> str:
    """That of the warm process that started as this interpreter did."""
    at_start = sorted(
        item
        for item in os.environ.items()
        if item[0].startswith(_READ_AT_START)
        and not item[0].startswith(_READ_LATER)
        and item[1] != "OFF"
    )
    return hashlib.sha256(repr((sys.executable, at_start)).encode()).hexdigest()[:16]


def line_to(key: str) -> socket.socket | None:
    """A line to the warm process of a key; the first who asks starts it."""
    place = begin(key)
    end = time.monotonic() + _STARTS_S
    while not place.exists():
        assert time.monotonic() < end, f"no warm process: {place.with_suffix('.log').read_text()}"
        time.sleep(0.01)
    if not place.is_socket():
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(str(place))
    return line


def begin(key: str) -> Path:
    """Start the warm process of a key, unless another has.

    Returns:
        Where it will listen, or a file where it could not import what it needs.
    """
    session, owner = _session()
    place = Path(session, key)
    with contextlib.suppress(FileExistsError), place.with_suffix(".log").open("xb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(place), owner],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # as agents have it
            start_new_session=True,
        )
        process.returncode = 0  # nobody waits for it: it ends with the session
    return place


def _serve(place: str, owner: int) -> None:
    """Until the session's first process has ended. Returns in each program's process."""
    try:
        _import(is_of_commands=Path(place).name == COMMAND)
    except ImportError:
        Path(place).touch()
        raise
    session = os.pidfd_open(owner)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{place}.new")
    listening.listen(64)
    os.rename(f"{place}.new", place)
    while True:
        ready, _, _ = select.select([listening, session], [], [], 1.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if session in ready:
            sys.exit()
        if listening not in ready:
            continue
        line, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os.close(session)
            _begin(line)
            return
        line.close()


def _import(*, is_of_commands: bool) -> None:
    import gc

    gc.disable()
    if is_of_commands:
        import paceline.cli

        verbs = pkgutil.iter_modules(paceline.cli.__path__, "paceline.cli.")
        for name in (*(verb.name for verb in verbs), *_OF_COMMANDS):
            importlib.import_module(name)
    else:
        for name in _OF_PROGRAMS:
            importlib.import_module(name)
        from paceline.runtime._torch_private import load_compiler

        load_compiler()
    gc.enable()
    gc.collect()
    gc.freeze()


def _begin(line: socket.socket) -> None:
    """Returns in the program's process."""
    content, files, _, _ = socket.recv_fds(line, _MAX_BYTES, _FROM)
    pid = os.fork()
    if pid:
        for each in files:
            os.close(each)
        _watch(line, pid)
    line.close()
    os.setpgid(0, 0)
    _become(json.loads(content), files)


def _watch(line: socket.socket, pid: int) -> NoReturn:
    """Passes signals on, and how it ended back."""
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([line, ended], [], [])
        if ended in ready:
            break
        number = int(line.recv(64) or signal.SIGKILL)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            break
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict, files: list[int]) -> None:
    from paceline.control import parent

    parent.die_with_parent(os.getppid())
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, _FROM) for each in files]
    for each in files:
        os.close(each)
    for each, number in zip(kept, request["files"], strict=True):
        os.dup2(each, number)
        os.close(each)
    for number in _PASSED_ON:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        ignored = number in request["ignored"]
        signal.signal(number, signal.SIG_IGN if ignored else default)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"] or [request["folder"], *sys.path[1:]]
    sys.argv = request["words"]
    _name_parent(request["parent"])


def _name_parent(pid: int) -> None:
    """Its parent is who started the one that stands in for it; that of its own forks is itself."""
    real = os.getppid
    os.getppid = lambda: pid

    def restore() -> None:
        os.getppid = real

    os.register_at_fork(after_in_child=restore)


def _run() -> NoReturn:
    """The program, and its end as the interpreter's, but for taking apart what was imported."""
    code: object = 0
    try:
        if sys.argv[0] == "paceline":
            from paceline.cli import main

            main()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:  # noqa: BLE001 - the edge of the process
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as a new process is; `random` does it by itself
    if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
        sys.modules.pop(sys.argv[0], None)  # it is run again, as __main__
    _run()

"""The command in a process of its own, without the second of imports that each start takes.

    done = run_command("run", "job.yaml", folder=tmp_path)

One process for all of a session's tests imports what the command imports, and every command is its
fork: with the folder, the environment and the streams it is given, and its own exit code. Those who
test how the command starts, or send it signals, start a new interpreter instead.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_STARTED: list["subprocess.Popen[bytes]"] = []
"""A fork must not let go of it: `Popen` warns."""

_STARTS_S = 300.0
"""It takes one second, and others are at work."""

_MAX_BYTES = 1 << 20
"""Of a request: an environment and some words."""


def run_command(
    *words: str, folder: Path, timeout: float = 400, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """`paceline WORDS` in a folder, to its end, whatever its exit code.

    Raises:
        subprocess.TimeoutExpired: It did not end in time, and is killed.
    """
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line,
    ):
        line.connect(_await(start_server()))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        request = {"words": words, "folder": str(folder), "env": dict(env or os.environ)}
        socket.send_fds(line, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        pid = int(line.recv(64))
        line.settimeout(timeout)
        try:
            code = int(line.recv(64) or -1)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout, _text(out), _text(err)) from None
        return subprocess.CompletedProcess(words, code, _text(out), _text(err))


def _text(file) -> str:
    file.seek(0)
    return file.read().decode()


@functools.cache
def start_server() -> str:
    """Start the server that this process and its forks share. It ends with this process.

    Returns:
        Where it will listen.
    """
    folder = tempfile.mkdtemp(prefix="paceline-command-")
    atexit.register(shutil.rmtree, folder)
    place = f"{folder}/line"
    ours, its = os.pipe2(os.O_CLOEXEC)
    process = subprocess.Popen(
        [sys.executable, __file__, place], stdin=ours, stdout=subprocess.DEVNULL
    )
    os.close(ours)  # it ends when the other end is closed: by this process and every fork
    _STARTED.append(process)
    atexit.register(process.wait)
    atexit.register(os.close, its)
    return place


def _await(place: str) -> str:
    end = time.monotonic() + _STARTS_S
    while not Path(place).exists():
        assert time.monotonic() < end, "the server of commands has not started"
        time.sleep(0.01)
    return place


def _serve(place: str) -> None:
    """Returns in each command's process, which is then all but started."""
    import select

    import paceline.cli

    for module in pkgutil.iter_modules(paceline.cli.__path__, "paceline.cli."):
        importlib.import_module(module.name)
    for name in _PRELOADED:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{place}.new")
    listening.listen(16)
    os.rename(f"{place}.new", place)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [], 1.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            sys.exit()
        if listening not in ready:
            continue
        line, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            content, streams, _, _ = socket.recv_fds(line, _MAX_BYTES, 2)
            pid = os.fork()
            if pid:
                _watch(line, pid)
            line.close()
            _become(json.loads(content), streams)
            return
        line.close()


def _watch(line: socket.socket, pid: int) -> None:
    """Never returns."""
    line.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict, streams: list[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([nothing, *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["folder"]
    sys.argv = ["paceline", *request["words"]]


_PRELOADED = (
    *("paceline.control.controller", "paceline.launch.places", "paceline.launch.preflight"),
    *("paceline.launch.local", "paceline.plan", "paceline.render", "paceline.record.run"),
)

if __name__ == "__main__":
    _serve(sys.argv[1])
    from paceline.cli import main

    main()

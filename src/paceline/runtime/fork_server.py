"""Imports what every worker needs, then forks one for each request of its agent.

    python -m paceline.runtime.fork_server --line 5 --agent 4711     (the agent starts it)

Nothing here may start a thread or compute with tensors: the forks would get half of it.
"""

# ruff: noqa: E402
import gc

gc.disable()  # imports leave no garbage: 4.1 s of a core with collections, 3.2 s without (measured)

import argparse
import os
import select
import signal
import socket
import sys

import msgspec
import torch

import paceline.runtime.language_model  # what a worker imports before it asks for its place
from paceline.control.fork_server import MAX_BYTES, Birth, News
from paceline.control.parent import die_with_parent
from paceline.runtime import worker
from paceline.runtime._torch_private import load_compiler

assert torch is not None
assert paceline is not None

load_compiler()


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline-fork-server", description=__doc__)
    parser.add_argument("--line", type=int, required=True, help="socket of the agent")
    parser.add_argument("--agent", type=int, required=True, help="process id of the agent")
    options = parser.parse_args()
    die_with_parent(options.agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=options.line)
    told, tells = socket.socketpair()
    for end in (told, tells):
        end.setblocking(False)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    gc.collect()
    gc.enable()
    gc.freeze()  # forks share these pages until they write to them, which a collection would
    _serve(line, told, tells)


def _serve(line: socket.socket, told: socket.socket, tells: socket.socket) -> None:
    workers: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([line, told], [], [])
        if told in ready:
            told.recv(4096)
            _tell_of_ends(line, workers)
        if line not in ready:
            continue
        content, descriptors, _, _ = socket.recv_fds(line, MAX_BYTES, 3)
        if not content:
            return
        birth = msgspec.json.decode(content, type=Birth)
        pid = os.fork()
        if pid == 0:
            for each in (line, told, tells):
                each.close()
            _become(birth, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        workers[pid] = birth.worker
        _tell(line, News(worker=birth.worker, pid=pid, returncode=None))


def _tell_of_ends(line: socket.socket, workers: dict[int, int]) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        returncode = os.waitstatus_to_exitcode(status)
        _tell(line, News(worker=workers.pop(pid), pid=pid, returncode=returncode))


def _tell(line: socket.socket, news: News) -> None:
    line.sendall(msgspec.json.encode(news))


def _become(birth: Birth, channel: int, slot: int, log: int) -> None:
    """The worker. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(birth.environment)
        parent = os.getppid()
        arguments = [*birth.arguments, "--parent", str(parent), "--channel", str(channel)]
        arguments += ["--slot", str(slot)]
        sys.argv = ["paceline-worker", *arguments]
        worker.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()

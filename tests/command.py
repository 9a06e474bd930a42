"""The command in a process of its own, without the half second of imports that each start takes.

    done = run_command("run", "job.yaml", folder=tmp_path)

Every command is a fork of one process that has imported what commands import (`warm/warm.py`): with
the folder, the environment and the streams it is given, and its own exit code. Those who test how
the command starts, or send it signals, start a new interpreter instead.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tests.warm import warm


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
        open(os.devnull) as nothing,
        warm.line_to(warm.COMMAND) as line,
    ):
        files = {number: file.fileno() for number, file in enumerate((nothing, out, err))}
        request = {"folder": str(folder), "environment": dict(env or os.environ)}
        warm.ask(line, ["paceline", *words], files, **request)
        line.settimeout(timeout)
        try:
            code = int(line.recv(64) or -1)
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, timeout, _text(out), _text(err)) from None
        return subprocess.CompletedProcess(words, code, _text(out), _text(err))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()

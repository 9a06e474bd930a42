"""From what a run was started: one line a start in `starts.jsonl`, and the code's difference from
its commit in `code-*.diff`.

Of the environment the names are kept, no value. A line that holds a secret is left out of the
difference, and so is the word of a command line.
"""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

import paceline
from paceline.job.secret_names import find_in_code
from paceline.job.secrets import find_secret, without_secrets
from paceline.record.lines import JsonLines, write_whole
from paceline.topology.node.probe_storage import is_of_a_run

STARTS_FILE = "starts.jsonl"

_MOST_DIFF_BYTES = 1 << 20
"""Kept of a difference: some twenty thousand lines. A guess."""

_MOST_NEW_FILES = 200
"""Files that git does not know yet, whose names are kept."""

_GIT_S = 10.0
"""What each question to git may take. A guess; the commit is known at once in any repository."""

_MOST_ANSWER_BYTES = 64 << 20
"""Read of what git answers. A guess."""

_SOURCES = {".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".json"}
"""Files that git does not know yet are part of the code with these endings."""

_MOST_SOURCE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code in a git work tree."""

    folder: str
    commit: str | None
    """None where nothing was committed yet."""

    branch: str | None
    is_dirty: bool | None
    """Whether a file differs from the commit, or is new; None where git could not tell."""

    diff_sha256: str | None = None
    """Hash of the whole difference; None where there is none."""

    diff_file: str | None = None
    """In the run's folder."""

    is_cut: bool = False
    """Whether the difference was larger than is kept."""

    new_files: tuple[str, ...] = ()
    """Files that git neither has nor ignores; sources among them are in the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run."""

    at: float
    """Seconds since 1970 (UTC)."""

    process: int
    command: tuple[str, ...]
    folder: str
    """Where it was given."""

    host: str
    system: str
    python: str
    paceline: str
    packages: dict[str, str] = field(default_factory=dict)
    """Name -> version of what is installed for this Python."""

    environment: tuple[str, ...] = ()
    """Names of the environment's variables."""

    code: Code | None = None
    """None where neither the job nor the command is in a git work tree."""

    no_code: str | None = None
    """Why that, or its difference from the commit, is not known."""


def keep_start(run: Path, job_folder: Path) -> None:
    """Add this command's start to a run's record, unless it is there: who makes a run starts it.

    Raises:
        OSError: The folder cannot be written.
    """
    path = run / STARTS_FILE
    if _newest_process(path) == (socket.gethostname(), os.getpid()):
        return
    code, why_not = _find_code(run, (job_folder, Path.cwd()))
    start = Start(
        at=time.time(),
        process=os.getpid(),
        command=tuple(map(_clean, without_secrets(sys.argv))),
        folder=_clean(str(Path.cwd())),
        host=socket.gethostname(),
        system=platform.platform(),
        python=platform.python_version(),
        paceline=paceline.__version__,
        packages=dict(sorted(_packages(sys.path))),
        environment=tuple(map(_clean, sorted(os.environ))),
        code=code,
        no_code=why_not,
    )
    file = JsonLines[Start](path)
    file.write(start)
    file.close()


def _newest_process(path: Path) -> tuple[str, int] | None:
    try:
        line = path.read_bytes().splitlines()[-1]
        newest = msgspec.json.decode(line, type=_Process)
    except (OSError, IndexError, msgspec.DecodeError):
        return None
    return newest.host, newest.process


class _Process(msgspec.Struct):
    host: str
    process: int


_INSTALLED = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")


def _packages(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    for folder in reversed(list(folders)):  # the first on the path is the one that is imported
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.fullmatch(name)
            if match is not None:
                yield match["name"].replace("_", "-").lower(), match["version"]


def _find_code(run: Path, folders: Sequence[Path]) -> tuple[Code | None, str | None]:
    """The code of the first folder that is in a work tree, and what is not known of it."""
    why_not = None
    for folder in folders:
        try:
            top = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n")))
        except _NoAnswer as error:
            why_not = why_not or str(error)
        else:
            return _code(run, top)
    return None, why_not


def _code(run: Path, top: Path) -> tuple[Code, str | None]:
    try:
        commit: str | None = _git(top, "rev-parse", "HEAD").decode().strip()
        branch: str | None = os.fsdecode(_git(top, "rev-parse", "--abbrev-ref", "HEAD").strip())
    except _NoAnswer:
        commit = branch = None
    code = Code(folder=_clean(str(top)), commit=commit, branch=branch, is_dirty=None)
    try:
        changed = _git(top, *_DIFF, "HEAD") if commit is not None else b""
        listed = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    except _NoAnswer as error:
        return code, str(error)
    names = sorted(os.fsdecode(name) for name in listed.split(b"\0") if name)
    new = [name for name in names if not is_of_a_run(top, Path(name).parent)]
    changed += b"".join(_as_new(top, name) for name in new)
    if not changed and not new:
        return replace(code, is_dirty=False), None
    digest = hashlib.sha256(changed).hexdigest() if changed else None
    return replace(
        code,
        is_dirty=True,
        diff_sha256=digest,
        diff_file=_keep_diff(run, f"code-{digest[:12]}.diff", changed) if digest else None,
        is_cut=len(changed) > _MOST_DIFF_BYTES,
        new_files=tuple(map(_clean, new[:_MOST_NEW_FILES])),
    ), None


def _keep_diff(run: Path, name: str, changed: bytes) -> str | None:
    """Write the difference into a file and return its name; None where the disk is full."""
    text = changed[:_MOST_DIFF_BYTES].decode(errors="replace")
    try:
        write_whole(run / name, "".join(_without_secrets(text)).encode())
    except OSError:
        return None
    return name


_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")


def _as_new(top: Path, name: str) -> bytes:
    """A source that git does not know, as a difference that adds it; empty for anything else."""
    path = top / name
    try:
        if path.suffix not in _SOURCES or path.is_symlink():
            return b""
        if path.stat().st_size > _MOST_SOURCE_BYTES:
            return b""
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return b""
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    added = "".join(f"+{line}\n" for line in lines)
    return _clean(f"{head}@@ -0,0 +1,{len(lines)} @@\n{added}").encode()


_GOES_ON = re.compile(r"[:=(,\[{\\]\s*$")


def _without_secrets(text: str) -> Iterator[str]:
    in_key, before = False, ""
    for line in text.splitlines(keepends=True):
        code = line[1:]
        kind = "a private key" if in_key else find_secret(line) or find_in_code(before + code)
        before = code if _GOES_ON.search(code) else ""  # its value is on the next line
        in_key = (in_key or "PRIVATE KEY-----" in line) and "-----END" not in line
        yield f"{line[:1]}[left out: {kind}]\n" if kind is not None else line


class _NoAnswer(Exception):
    """Git has none."""


def _git(folder: Path, *words: str) -> bytes:
    """What git answers; no program that a repository's settings name is started.

    Raises:
        _NoAnswer: It is not installed, refuses, or takes too long.
    """
    command = ("git", "-c", "core.fsmonitor=false", "-C", str(folder), *words)
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                timeout=_GIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _NoAnswer(f"git {words[0]} took longer than {_GIT_S:.0f} s") from None
        except OSError as error:
            raise _NoAnswer(f"git cannot be started: {error.strerror}") from None
        out.seek(0)
        err.seek(0)
        if done.returncode:
            said = err.read(4096).decode(errors="replace").strip().splitlines()
            raise _NoAnswer(said[-1][:200] if said else f"git {words[0]}: {done.returncode}")
        return out.read(_MOST_ANSWER_BYTES)


def _clean(text: str) -> str:
    """Text that can be encoded: a name of the system's may hold any bytes."""
    return text.encode(errors="replace").decode()

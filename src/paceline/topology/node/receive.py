"""The files of a job's folder on one node: list them, and take what was sent (`launch/sync.py`)."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.topology.node.messages import Sent, Take, Taken
from paceline.topology.node.probe_storage import code_files, folder_links, is_of_a_run
from paceline.topology.probe import Look, run_tool

MARK = ".paceline-sync"
"""File in a folder that was synced: the names that sync sent. Nothing else is ever removed."""

_EXECUTABLE = "+x"
"""Behind the hash of a file that can be started."""

_SYSTEM_FOLDERS = frozenset(
    (
        *("bin", "boot", "dev", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc"),
        *("run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    )
)
"""Below `/`. Source: Filesystem Hierarchy Standard 3.0, and Linux's /proc and /sys."""


def take(asked: Take) -> Taken:
    """Write what was sent, remove what is to go, and say what is there then."""
    folder = Path(asked.folder)
    if is_of := _is_of_the_system(folder, asked.removed):
        return Taken(why_not=f"{folder} is {is_of}: give --to a folder of the job's own")
    try:
        for name, sent in asked.files.items():
            _write(_inside(folder, name), sent)
        for name in asked.removed:
            _inside(folder, name).unlink(missing_ok=True)
        if not asked.is_dry:
            kept = {*(_read_mark(folder) or ()), *asked.names} - {*asked.removed}
            mark = json.dumps({"synced": sorted(kept)}).encode()
            _write(folder / MARK, Sent(content=mark, is_executable=False))
    except OSError as error:
        return Taken(why_not=f"{error.filename or folder}: {error.strerror or error}")
    return list_folder(folder, {*asked.names, *(_read_mark(folder) or ())})


def _read_mark(folder: Path) -> tuple[str, ...] | None:
    """Files of the folder that earlier syncs sent; None where it is not marked, or not by us."""
    try:
        return tuple(map(str, json.loads((folder / MARK).read_bytes())["synced"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_folder(folder: Path, names: Iterable[str] | None = None) -> Taken:
    """What is in the folder, and the commit that git has there.

    Args:
        folder: One that is not there has no files.
        names: Paths relative to it, whatever they are. What else looks like code is listed beside
            them. None: all that git has and does not ignore, but the folder's own `runs` and the
            runs of jobs below it; without git, all that looks like code.
    """
    looks: list[Look] = []
    git = ["git", "-C", str(folder)]
    is_git, _, prefix = run_tool(
        [*git, "rev-parse", "--is-inside-work-tree", "--show-prefix"], looks
    ).partition("\n")
    has_git = is_git == "true"
    commit = run_tool([*git, "rev-parse", "--verify", "-q", "HEAD"], looks) if has_git else ""
    runs = re.sub(r"([*?[\\])", r"\\\1", prefix.rstrip("\n"))  # patterns begin at git's own folder
    listing = [*git, "ls-files", "-z"]
    others = [*listing, "-o", "--exclude-standard", f"--exclude=/{runs}runs/"]
    found = {str(path.relative_to(folder)) for path in code_files(folder)}
    if names is not None:
        found.update(names)
    elif has_git:
        new = filter(None, run_tool(others, looks).split("\0"))
        found = {name for name in new if not is_of_a_run(folder, Path(name).parent)}
        found.update(filter(None, run_tool(listing, looks).split("\0")))
    names = sorted(found - {MARK})
    files = {name: _hash(folder / name) for name in names if (folder / name).is_file()}
    status = [*git, "status", "--porcelain", "--", ".", f":!{MARK}"]
    changed = run_tool(status, looks) if has_git else ""
    return Taken(
        files=files,
        synced=_read_mark(folder),
        links=tuple(str(path.relative_to(folder)) for path in folder_links(folder)),
        has_git=has_git,
        commit=commit.strip(),
        has_changes=bool(changed.strip()),
    )


def read_file(path: Path) -> Sent:
    """A file as it is sent."""
    return Sent(content=path.read_bytes(), is_executable=os.access(path, os.X_OK))


def _is_of_the_system(folder: Path, removed: Sequence[str]) -> str | None:
    """What a folder is that no job has to itself."""
    real = folder.resolve()
    if real == Path("/") or (len(real.parts) == 2 and real.name in _SYSTEM_FOLDERS):
        return "the system's"
    return "somebody's home" if removed and real == Path.home().resolve() else None


def _hash(path: Path) -> str:
    sent = read_file(path)
    mark = _EXECUTABLE if sent.is_executable else ""
    return hashlib.sha256(sent.content).hexdigest() + mark


def _inside(folder: Path, name: str) -> Path:
    """
    Raises:
        OSError: The name leads out of the folder, maybe by a link.
    """
    path = folder / name
    if Path(name).is_absolute() or not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(0, "this is not inside of the job's folder", name)
    return path


def _write(path: Path, sent: Sent) -> None:
    """Whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".paceline-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sent.content)
        os.chmod(name, 0o755 if sent.is_executable else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

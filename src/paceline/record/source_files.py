"""The files that `lint` and `scan` are pointed at: folders walked through, each file read once."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import JobError

MOST_BYTES = 4 * 2**20
"""Far above any program or manifest; CRDs and generated data are larger."""

_MOST_NOTEBOOK_BYTES = 16 * MOST_BYTES
"""Notebooks hold their pictures."""

_GIT_S = 10.0
"""Longest wait for git, which answers in milliseconds."""

PASSED_OVER = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    ".eggs",
    "__pycache__",
    "node_modules",
    "site-packages",
    "build",
    "dist",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".ipynb_checkpoints",
    "wandb",
    "mlruns",
}
"""Folders of tools and of what they made; named themselves they are read."""

NOTEBOOK = ".ipynb"
ENDINGS = {
    ".py",
    NOTEBOOK,
    ".yaml",
    ".yml",
    ".json",
    ".toml",
    ".sh",
    ".bash",
    ".sbatch",
    ".slurm",
    ".job",
    ".env",
    ".conf",
    ".pem",
}
PREFIXES = ("dockerfile", ".env.", "requirements")
NAMES = {"dockerfile", "containerfile", "hostfile", "machinefile", ".env", ".deepspeed_env"}
NAMES |= {"id_rsa", "id_ecdsa", "id_ed25519"}  # where ssh-keygen writes private keys


@dataclass(slots=True)
class Sources:
    """What was read, and what was not."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By the name that the reader would type."""

    paths: dict[str, Path] = field(default_factory=dict)
    troubles: list[tuple[str, str]] = field(default_factory=list)
    """Path and why it was not read."""

    named: list[str] = field(default_factory=list)
    """Those that were named themselves, not found in a folder."""


def read_sources(paths: Sequence[Path], *, verb: str = "lint") -> Sources:
    """Every file of these paths that may be a program or a configuration.

    Raises:
        JobError: A path does not exist (`V020`).
    """
    sources = Sources()
    seen: set[tuple[int, int]] = set()
    links: list[Path] = []
    for path in paths:
        try:
            is_folder = path.is_dir()
            exists = is_folder or path.exists()
        except OSError as error:
            sources.troubles.append((str(path), (error.strerror or str(error)).lower()))
            continue
        if not exists:
            raise JobError.of(
                code="V020",
                what=f"there is no {path}",
                where=f"paceline {verb}",
                fix="name files or folders that exist",
            )
        for each in _below(path, seen, links, sources) if is_folder else [path]:
            _read(each, sources, is_named=not is_folder)
    own = {path.resolve() for path in sources.paths.values()} if links else set()
    for link in links:  # grows while what links lead to is walked through
        for each in _below(link, seen, links, sources) if link.is_dir() else [link]:
            target = each.resolve()
            if target not in own:
                own.add(target)
                _read(each, sources, is_named=False)
    return sources


def is_git_ignored(path: Path) -> bool:
    """Whether git is told to leave this file out of commits; False without git or a repository.
    Tracked files are never ignored."""
    command = ("git", "-c", "core.fsmonitor=false", "check-ignore", "-q", "--", path.name)
    try:
        done = subprocess.run(
            command, cwd=path.resolve().parent, capture_output=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _below(
    folder: Path, seen: set[tuple[int, int]], links: list[Path], sources: Sources
) -> Iterator[Path]:
    """Files of a folder in order. Links go to `links`, so that a file is read by its own name
    where it has one here; a folder that several lead to is walked through once."""
    try:
        status = folder.stat()
        key = (status.st_dev, status.st_ino)
        if key in seen:
            return
        seen.add(key)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        sources.troubles.append((str(folder), (error.strerror or str(error)).lower()))
        return
    for entry in entries:
        path = Path(entry.path)
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError as error:  # a link to itself
            sources.troubles.append((str(path), (error.strerror or str(error)).lower()))
            continue
        if is_folder:
            if entry.name not in PASSED_OVER and not os.path.exists(path / "pyvenv.cfg"):
                if entry.is_symlink():
                    links.append(path)
                else:
                    yield from _below(path, seen, links, sources)  # says where it may not be opened
        elif is_file and _may_be_source(path):
            if entry.is_symlink():
                links.append(path)
            else:
                yield path


def _may_be_source(path: Path) -> bool:
    name = path.name.lower()
    if path.suffix.lower() in ENDINGS or name in NAMES or name.startswith(PREFIXES):
        return True
    if path.suffix:
        return False
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _read(path: Path, sources: Sources, *, is_named: bool) -> None:
    name = path.as_posix()
    if name in sources.files:
        return
    try:
        if not path.is_file():
            sources.troubles.append((name, "not a file: a pipe or a device is not read"))
            return
        size = path.stat().st_size
        most = _MOST_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else MOST_BYTES
        if size > most:
            if is_named or path.suffix in (".py", NOTEBOOK):
                sources.troubles.append((name, f"{size} bytes: more than is read ({most})"))
            return
        data = path.read_bytes()
    except OSError as error:
        sources.troubles.append((name, (error.strerror or str(error)).lower()))
        return
    empty = not data.strip()
    if is_named and empty and path.name != "__init__.py":  # as a hook names it, with the others
        sources.troubles.append((name, "empty"))
        return
    if is_named and not empty:
        sources.named.append(name)
    sources.files[name] = data
    sources.paths[name] = path

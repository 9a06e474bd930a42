"""A copy of a folder, which a program may write into and never reaches the folder itself through.

Leaves out: files by absolute paths. Nothing but a sandbox keeps a program from those.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from paceline.errors import JobError
from paceline.units import format_bytes

MOST_BYTES = 2 << 30
MOST_FILES = 50_000
"""What is copied at most: a few seconds on a disk that writes 500 MB/s. Guesses."""

_ENVIRONMENT = "pyvenv.cfg"
"""Stands in a virtual environment, which is large and used by its own path."""


@dataclass(slots=True)
class Listed:
    """What a copy will consist of, by path relative to it."""

    files: dict[Path, Path] = field(default_factory=dict)
    """Where each file's content is."""

    folders: list[Path] = field(default_factory=list)
    links: dict[Path, Path] = field(default_factory=dict)
    """To other places of the copy, relative to it."""

    left_out: list[str] = field(default_factory=list)
    num_bytes: int = 0


def list_writable(folder: Path) -> Listed:
    """Everything in a folder. A symbolic link that leads out of it stands for a copy of what it
    leads to, a hard link for a file of its own.

    Raises:
        JobError: `R077`, it is more than a copy may be.
    """
    listed, mapped = Listed(), dict[Path, Path]()
    sizes: dict[str, int] = {}
    for path, target, size in _walk(folder.resolve(), Path(), mapped, listed):
        listed.files[path] = target
        listed.num_bytes += size
        sizes[path.parts[0]] = sizes.get(path.parts[0], 0) + size
        if listed.num_bytes > MOST_BYTES or len(listed.files) > MOST_FILES:
            raise _too_large(folder, max(sizes, key=lambda name: sizes[name]))
    return listed


def write_copy(listed: Listed, to: Path) -> None:
    """Write the copy into a new folder.

    Raises:
        JobError: `R002`, there is no room for it.
    """
    to.mkdir(parents=True)
    for path in listed.folders:
        (to / path).mkdir()
    for path, source in listed.files.items():
        try:
            shutil.copy2(source, to / path)
        except PermissionError:
            listed.left_out.append(f"{path} (cannot be read)")
        except OSError as error:
            raise JobError.of(
                code="R002",
                what=f"{source} cannot be copied: {error.strerror or error}",
                where="TMPDIR",
                fix="let TMPDIR name a folder with room for a copy of the script's folder",
            ) from None
    for path, target in listed.links.items():
        (to / path).symlink_to(os.path.relpath(to / target, (to / path).parent))


def _walk(
    source: Path, at: Path, mapped: dict[Path, Path], listed: Listed
) -> Iterator[tuple[Path, Path, int]]:
    """Path in the copy, path of the content and bytes of each file below a real folder.

    Args:
        mapped: Where each folder that is copied whole will be: a link into one becomes a link
            within the copy, so that links in circles come to an end.
    """
    if not any(source.is_relative_to(root) for root in mapped):
        mapped[source] = at
    try:
        entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    except OSError as error:
        listed.left_out.append(f"{at} ({error.strerror})")
        return
    for entry in entries:
        path, real = at / entry.name, Path(entry.path)
        try:
            if entry.is_symlink():
                real = real.resolve(strict=True)
                root = next((each for each in mapped if real.is_relative_to(each)), None)
                if root is not None:
                    listed.links[path] = mapped[root] / real.relative_to(root)
                    continue
            status = real.stat()
        except (OSError, RuntimeError):  # a link to nothing, or in a circle
            listed.left_out.append(f"{path} (a link to nothing)")
            continue
        if S_ISDIR(status.st_mode) and (real / _ENVIRONMENT).is_file():
            listed.left_out.append(f"{path} (a virtual environment)")
        elif S_ISDIR(status.st_mode):
            listed.folders.append(path)
            yield from _walk(real, path, mapped, listed)
        elif S_ISREG(status.st_mode):
            yield path, real, status.st_size
        else:
            listed.left_out.append(f"{path} (no plain file)")


def _too_large(folder: Path, largest: str) -> JobError:
    return JobError.of(
        code="R077",
        what=f"{folder} has more than {format_bytes(MOST_BYTES)} or {MOST_FILES:,} files, which a "
        f"copy to try the script in may have; {largest} has most of it",
        where="the script's folder",
        fix="move what the script does not need out of it, or --in-place: the script then writes "
        "into the folder itself",
    )

"""Folders that a run writes to, file systems, and hashes that tell whether nodes have the same."""

import glob
import hashlib
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import paceline
from paceline.topology.node.facts import Disk, Drive, FolderFacts, Mounted

ON_MANY_MACHINES = ("nfs", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "fuse.ceph", "wekafs")
"""Beginnings of the types of file systems that many machines mount."""

_ANSWERS_S = 2.0
"""For a file system to state its room. A guess: one whose server is gone never does."""

_SECTOR = 512
"""Bytes of the unit of /sys/block/*/size, whatever the disk's own. Source: Linux,
include/linux/types.h, sector_t."""

_MOST_FILES = 5000
_MOST_BYTES = 64 * 2**20
"""Bytes of one program's files that are hashed, read in below a second. A guess."""

_CODE = (".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini")
"""Ends of names of what a program is made of. Not .json and .txt: runs write such files too."""

_RUN_FILE = "run.json"
_NO_CODE = ("pyvenv.cfg", _RUN_FILE)
"""Files that mark a virtual environment, and a run's folder."""

_LOCK_IS_OLD_S = 600.0
"""A build of an extension that takes longer is rare. A guess."""


def look_at_folder(path: str, note: str | None = None) -> FolderFacts:
    """Room, type and whether a file can be written; the file is taken away again."""
    nearest, file = Path(path), None
    while not nearest.is_dir() and nearest != nearest.parent:
        if file is None and os.path.lexists(nearest):
            file = nearest
        nearest = nearest.parent
    return FolderFacts(
        path=path,
        nearest=str(nearest),
        kind=kind_of(nearest),
        disk=disk_of(nearest),
        why_not=_why_not_writable(nearest) if file is None else f"{file} is no folder",
        note=None if note is None else _read(nearest / note),
        disk_model=_disk_model(nearest),
    )


def _disk_model(path: Path) -> str | None:
    """Model of the disk, or of the one that the partition is on; None of volumes over several."""
    try:
        number = path.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    models = (_read(folder / "device" / "model") for folder in (block, block.parent))
    return next((model.strip() for model in models if model), None)


def disk_of(path: Path) -> Disk | None:
    """Room there, for a user without rights; None when it cannot be asked."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    size = found.f_frsize
    return Disk(total_bytes=size * found.f_blocks, free_bytes=size * found.f_bavail)


def find_drives(block: Path = Path("/sys/block")) -> tuple[Drive, ...]:
    """The disks behind a device: no partitions, no loops, no memory, no volumes over several."""
    found = []
    for folder in sorted(block.glob("*")):
        size = _read(folder / "size") or ""
        if (folder / "device").exists() and size.strip().isdecimal() and int(size):
            found.append(
                Drive(
                    name=folder.name,
                    kind=_drive_kind(folder),
                    total_bytes=int(size) * _SECTOR,
                    model=(_read(folder / "device" / "model") or "").strip() or None,
                )
            )
    return tuple(found)


def _drive_kind(folder: Path) -> Literal["NVMe", "SSD", "HDD", "virtual"]:
    if folder.name.startswith("nvme"):
        return "NVMe"
    if folder.name.startswith(("vd", "xvd")):  # a hypervisor's, which says nothing of the medium
        return "virtual"
    return "HDD" if (_read(folder / "queue" / "rotational") or "").strip() == "1" else "SSD"


def find_mounts() -> tuple[Mounted, ...]:
    """File systems on disks and on servers, each once, with their room."""
    found: dict[str, tuple[str, str]] = {}
    for source, path, kind in _mounts():
        is_disk = source.startswith("/dev/") and not source.startswith("/dev/loop")
        if is_disk or kind.startswith(ON_MANY_MACHINES):
            known = found.get(source)
            if known is None or len(path) < len(known[0]):
                found[source] = (path, kind)
    return tuple(
        Mounted(path=path, kind=kind, source=source, disk=_soon(path))
        for source, (path, kind) in found.items()
    )


def _soon(path: str) -> Disk | None:
    """Its room, where it answers in time."""
    answers: list[Disk | None] = []
    asks = threading.Thread(target=lambda: answers.append(disk_of(Path(path))), daemon=True)
    asks.start()
    asks.join(_ANSWERS_S)
    return answers[0] if answers else None


def _mounts() -> Iterator[tuple[str, str, str]]:
    """Source, path and type of everything that is mounted."""
    for line in (_read(Path("/proc/self/mounts")) or "").splitlines():
        cells = line.split()
        if len(cells) > 2:
            yield cells[0], cells[1].encode().decode("unicode_escape"), cells[2]


def kind_of(path: Path) -> str | None:
    """Type of the file system that a path is on; None where the kernel has no list of mounts."""
    best, kind = "", None
    real = os.path.realpath(path)
    for _, mount, each in _mounts():
        if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, each
    return kind


def stale_locks() -> tuple[str, ...]:
    """`lock` files of PyTorch's extension builder that nobody has touched for long."""
    root = Path(
        os.environ.get("TORCH_EXTENSIONS_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    )
    found = []
    for path in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        try:
            if time.time() - path.stat().st_mtime > _LOCK_IS_OLD_S:
                found.append(str(path))
        except OSError:  # gone meanwhile
            continue
    return tuple(found)


def hash_code(code: Mapping[str, str], *, own: bool = True) -> dict[str, str]:
    """Hash each program's code, and Paceline's: relative names and contents.

    Args:
        code: What it is called -> the file, or the folder of them. On each node the same names,
            wherever the folder is there.
        own: Whether Paceline's files are read too.
    """
    ours = {"paceline": _hash_files(Path(paceline.__file__).parent)} if own else {}
    return ours | {name: _hash_files(Path(path)) for name, path in code.items()}


MOST_DATA_BYTES, MOST_DATA_FILES = 256 << 20, 1000
"""Data that are read to be compared, of all globs together: some seconds from a disk."""


def hash_data(patterns: Iterable[str], *, reads: bool = True) -> dict[str, str]:
    """Each glob -> a hash over the names and sizes of its files; empty where there are none.

    Args:
        reads: Whether contents count too: of the first files, as many as are read.
    """
    found = {}
    left = MOST_DATA_BYTES if reads else 0
    num_read = 0
    for pattern in patterns:
        rows = []
        for name in sorted(glob.glob(pattern, recursive=True)):
            try:
                found_there = os.stat(name)
            except OSError:
                continue
            if stat.S_ISREG(found_there.st_mode):  # a folder's own size says nothing
                rows.append(f"{name} {found_there.st_size}")
                if num_read < MOST_DATA_FILES and 0 < found_there.st_size <= left:
                    rows[-1] += f" {_hash_files(Path(name))}"
                    num_read, left = num_read + 1, left - found_there.st_size
        found[pattern] = hashlib.sha256("\n".join(rows).encode()).hexdigest() if rows else ""
    return found


def _hash_files(folder: Path) -> str:
    """Hash one file or a folder; empty text where it is not there."""
    if folder.is_file() and os.access(folder, os.R_OK):
        return hashlib.sha256(folder.read_bytes()).hexdigest()
    if not folder.is_dir():
        return ""
    digest, num_bytes = hashlib.sha256(), 0
    for number, path in enumerate(code_files(folder)):
        if number >= _MOST_FILES or num_bytes >= _MOST_BYTES:
            break
        try:
            content = path.read_bytes()
        except OSError:
            continue
        num_bytes += len(content)
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def code_files(folder: Path) -> list[Path]:
    """Programs, scripts and configurations below a folder; not those of environments, of its own
    `runs` and of other runs below it: a package may be called runs."""
    found: list[Path] = []
    for root, _, names in _code_folders(folder):
        found += [Path(root) / name for name in sorted(names) if name.endswith(_CODE)]
        if len(found) > _MOST_FILES:
            break
    return found


def folder_links(folder: Path) -> list[Path]:
    """Links to folders, where code is looked for: they are not followed."""
    found = (Path(root) / name for root, names, _ in _code_folders(folder) for name in names)
    return [path for path in found if path.is_symlink()]


def _code_folders(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Folders that may hold code, each with the folders and files in it."""
    for root, folders, names in os.walk(folder):
        left_out = {"__pycache__", "node_modules"} | ({"runs"} if Path(root) == folder else set())
        folders[:] = sorted(
            each
            for each in folders
            if each not in left_out
            and not each.startswith(".")
            and not any(os.path.exists(os.path.join(root, each, mark)) for mark in _NO_CODE)
        )
        yield root, folders, names


def is_of_a_run(top: Path, inside: Path) -> bool:
    """Whether a folder, given relative to `top`, is a run's or below one."""
    folders = (inside, *inside.parents)[:-1]  # the last is `top` itself
    return any((top / folder / _RUN_FILE).exists() for folder in folders)


def _why_not_writable(folder: Path) -> str | None:
    path = folder / f".paceline-preflight-{secrets.token_hex(4)}"
    try:
        with path.open("xb") as file:
            file.write(b"paceline preflight\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # a file that cannot be taken away is written all the same
            print(f"{path}: {error.strerror}", file=sys.stderr)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None

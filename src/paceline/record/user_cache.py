"""The user's folder for what can be made again."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

KEEP_S = 30 * 86400.0
"""How long a file is kept that nobody has written to. A guess."""


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/paceline`, made where it is not there.

    Raises:
        OSError: It cannot be made.
        RuntimeError: The user has no home.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "paceline"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def read_cached(path: Path) -> bytes:
    """What lies in a file; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def write_cached(path: Path, data: bytes) -> None:
    """Replace a file, `KIND-NAME`, as a whole; those of its kind that nobody has written to within
    `KEEP_S` are removed.

    Raises:
        OSError: It cannot be written, and is as it was.
    """
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(made, path)
    except OSError:
        os.unlink(made)
        raise
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
            if time.time() - other.stat().st_mtime > KEEP_S:
                other.unlink()

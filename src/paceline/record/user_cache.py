"""The user's folder for what can be made again."""

import contextlib
import os
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


def sweep(folder: Path, pattern: str) -> None:
    """Remove files that nobody has written to within `KEEP_S`."""
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            if time.time() - path.stat().st_mtime > KEEP_S:
                path.unlink()

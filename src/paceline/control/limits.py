"""Limits that an agent raises for its workers, as far as it may."""

import contextlib
import resource

ENOUGH_FILES = 65536
"""Sockets of some ten thousand ranks, and data files. A guess; more costs programs that go through
all numbers a file may have."""


def raise_open_files() -> None:
    """Let this process and its children open as many files as it may, up to `ENOUGH_FILES`.

    Shells start with 1024, of which a rank among some hundred has too few; the hard limit is often
    far above. Source: getrlimit(2), systemd's DefaultLimitNOFILE.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = open_files_of_workers(_finite(soft), _finite(hard))
    if most is not None and most != soft:
        with contextlib.suppress(ValueError, OSError):  # macOS has a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_files_of_workers(soft: int | None, hard: int | None) -> int | None:
    """What an agent's workers may open, where a shell has these limits; None is unlimited."""
    if soft is None:
        return None
    return max(soft, ENOUGH_FILES if hard is None else min(hard, ENOUGH_FILES))


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit

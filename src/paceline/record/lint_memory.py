"""Where lint's memory of a folder lies: one file of the user's cache for each call that is unlike.

A file that cannot be read or written costs time and nothing else.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import paceline
from paceline.record.user_cache import user_cache

_CODE = ("check/finding.py", "check/lint", "catalog", "job")
"""What of this package decides what lint finds in a file."""

_PARSERS = ("tree-sitter", "tree-sitter-bash", "PyYAML")


def rules_version() -> str:
    """A digest of the rules, of the data that they read and of the parsers that they use."""
    digest = hashlib.blake2b(repr(sys.version_info).encode(), digest_size=16)
    root = Path(paceline.__file__).parent
    for name in _CODE:
        place = root / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in files:
            if path.suffix in {".py", ".toml", ".csv", ".md"}:
                digest.update(path.read_bytes())
    for name in _PARSERS:
        with contextlib.suppress(PackageNotFoundError):
            digest.update(version(name).encode())
    return digest.hexdigest()


def memory_file(paths: Sequence[Path], asked: str) -> Path | None:
    """The file for a call; None where only files are named, or there is no cache folder or no
    working directory.

    Args:
        paths: What lint was pointed at.
        asked: What else was said, so that calls that say other things do not displace each other.
    """
    if not any(path.is_dir() for path in paths):
        return None  # a hook names other files every time
    with contextlib.suppress(OSError, RuntimeError):
        said = "\n".join([os.getcwd(), asked, *map(str, paths)])
        name = hashlib.blake2b(os.fsencode(said), digest_size=12).hexdigest()
        return user_cache() / f"lint-{name}.json"
    return None

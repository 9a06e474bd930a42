"""Where snapshots of the ranks' state lie in a node's memory, so that they can be taken away.

Files of `/dev/shm`: they outlive the process that wrote them, and not the node.
"""

import re
from pathlib import Path

import xxhash

FOLDER = Path("/dev/shm")
"""Linux's memory file system. Source: shm_overview(7)."""


def snapshot_path(folder: Path, run: Path, *, node: int, slot: int, turn: int) -> Path:
    """One of the two files that a slot's snapshots go to in turn.

    Args:
        node: On whose memory it lies. On one machine that plays several nodes, they stay apart.
    """
    return folder / f"{_prefix(run)}-node{node}-slot{slot}-{turn}"


def snapshot_slots(folder: Path, run: Path, *, node: int) -> list[int]:
    """Slots whose snapshots lie in a node's memory, in order."""
    pattern = re.compile(rf"{re.escape(_prefix(run))}-node{node}-slot(\d+)-[01]")
    found = (pattern.fullmatch(path.name) for path in folder.glob(f"{_prefix(run)}-node*"))
    return sorted({int(match[1]) for match in found if match})


def remove_snapshots(folder: Path, run: Path, *, node: int | None = None) -> int:
    """Take away a run's snapshots, of one node or all; how many files there were."""
    which = r"\d+" if node is None else str(node)
    pattern = re.compile(rf"{re.escape(_prefix(run))}-node{which}-slot\d+-[01]")
    found = [path for path in folder.glob(f"{_prefix(run)}-node*") if pattern.fullmatch(path.name)]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _prefix(run: Path) -> str:
    """Two runs of one name in different places are told apart by where they are."""
    place = xxhash.xxh3_64_hexdigest(bytes(run.resolve()))
    return f"paceline-{place}"

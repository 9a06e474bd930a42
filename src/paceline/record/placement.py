"""Where a run is, when it is not only on this machine: `place.json` in its folder."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline.errors import JobError
from paceline.record.lines import write_json

PLACE_FILE = "place.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Contents of `place.json`. No secrets: everybody who can read the run reads it."""

    place: str
    job_id: str | None = None
    """The queue's id of it; None where there is no queue."""

    hosts: dict[int, str] = field(default_factory=dict)
    """Node -> the host that its newest agent was started on; empty on this machine."""


def write_placement(folder: Path, placement: Placement) -> None:
    """Whole or not at all."""
    write_json(folder / PLACE_FILE, placement)


def read_placement(folder: Path) -> Placement | None:
    """None where the run is on this machine only.

    Raises:
        JobError: `W002`, the file is damaged.
    """
    try:
        content = (folder / PLACE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Placement)
    except (msgspec.DecodeError, OSError) as error:
        raise JobError.of(
            code="W002",
            what=f"{PLACE_FILE} cannot be read: {error}",
            where=str(folder / PLACE_FILE),
            fix="put it back; it says where the run is, and which job of the queue it is",
        ) from None

"""Which collective each process group of this worker is at: a rank that is behind in one is who the
others wait for (`control/blame.py`).
"""

from pathlib import Path

import msgspec

from paceline.control.messages import At
from paceline.record.lines import write_whole
from paceline.runtime._torch_private import ranks_by_group, recorded_collectives


def collectives(since_ns: int) -> dict[str, At]:
    """The last collective that this rank has called and the last that has ended, by the group: its
    name, which is the same on all ranks, its library and its ranks, such as `0 nccl|0,1,2`. Empty
    where torch's flight recorder does not have them.

    Args:
        since_ns: When this generation began, on the clock of `time.time_ns`: the recorder has older
            ones too, of groups with the same names.
    """
    ranks = ranks_by_group()
    found: dict[str, At] = {}
    for entry in recorded_collectives():
        name = entry["process_group"][0]
        members = ranks.get(name)
        if members is None or entry["is_p2p"] or entry["time_created_ns"] < since_ns:
            continue
        library = entry["profiling_name"].partition(":")[0]  # each counts for itself
        key = f"{name} {library}|{','.join(map(str, members))}"
        number = int(entry["collective_seq_id"])
        called, ended = found.get(key, (0, 0))
        has_ended = entry["retired"] or entry["state"] == "completed"
        found[key] = max(called, number), max(ended, number if has_ended else 0)
    return found


def keep_dump(logs: Path, *, rank: int, generation: int, since_ns: int) -> None:
    """Write what the recorder has of this generation into the run's logs, for `paceline diagnose`:
    `flight-rank-N.json`, in the place of an older one. Nothing where it has nothing."""
    entries = [one for one in recorded_collectives() if one["time_created_ns"] >= since_ns]
    if not entries:
        return
    groups = {name: {"ranks": str(ranks)} for name, ranks in ranks_by_group().items()}
    dump = {"rank": rank, "generation": generation, "pg_config": groups, "entries": entries}
    write_whole(logs / f"flight-rank-{rank}.json", msgspec.json.encode(dump))

"""What the controller's journal costs: writing an entry, syncing one, and taking over from it.

    python benchmarks/journal.py [FOLDER]

Writes what a run of four ranks tells its controller, into FOLDER (default: a temporary one), and
replays it. Nothing else is started.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.failover import Entry, Memory, advance, encode_entry, replay, snapshot
from paceline.control.journal import Journal

NUM_STEPS = 2000
NUM_SYNCS = 200


def main() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(sys.argv[1] if len(sys.argv) > 1 else temporary) / "journal")


def measure(path: Path) -> None:
    setup = st.Setup(
        num_nodes=1,
        ranks_per_node=4,
        num_steps=NUM_STEPS,
        max_restarts=3,
        grace_s=60.0,
        versions={},
        resumed=False,
        layout="DDP over 4 ranks",
    )
    memory = Memory(state=st.State(setup=setup), token="", lines_before=0)
    journal = Journal(path)
    journal.begin(snapshot(memory))
    at_s = 0.0

    def take(event: st.Happening, *, sync: bool = False) -> float:
        nonlocal at_s
        at_s += 0.001
        began_s = time.perf_counter()
        entry = Entry(monotonic_s=at_s, unix_s=at_s, node=None, number=0, event=event)
        advance(memory, entry)
        journal.write(encode_entry(entry), sync=sync)
        return time.perf_counter() - began_s

    take(st.Begin())
    take(st.AgentJoined(0, "a", 1))
    for worker in range(4):
        take(said(worker, 0, say.Ready(host="127.0.0.1", port=1)))
    for worker in range(4):
        take(said(worker, 1, say.Met(world_size=4, backend="gloo")))
    for worker in range(4):
        restored = say.Restored(first_step=1, source="initial", checkpoint=None, refused=[])
        take(said(worker, 1, restored))
    steps_s = [
        take(said(worker, 1, say.StepDone(step=step, loss=1.5, tokens_per_s=1e4, unit="tokens")))
        for step in range(1, NUM_STEPS + 1)
        for worker in range(4)
    ]
    syncs_s = [take(st.Tick(), sync=True) for _ in range(NUM_SYNCS)]
    journal.close()
    row("decide and write a step's news", steps_s, 1e6, "us")
    row("decide, write and sync a tick", syncs_s, 1e3, "ms")
    num = len(steps_s) + len(syncs_s)
    print(f"bytes of an entry: {path.stat().st_size / num:.0f}")
    timed("replay", lambda: replay(path), num)


def said(worker: int, generation: int, message: say.FromWorker) -> say.Said:
    return say.Said(worker=worker, generation=generation, message=message)


def row(name: str, values_s: list[float], scale: float, unit: str) -> None:
    cuts = statistics.quantiles(values_s, n=100)
    shown = ", ".join(f"p{p} {cuts[p - 1] * scale:.3g} {unit}" for p in (50, 95, 99))
    print(f"{name}: {shown} (n = {len(values_s)})")


def timed(name: str, call: Callable[[], object], num: int) -> None:
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    low, middle, high = min(times_s), statistics.median(times_s), max(times_s)
    print(f"{name} of {num} entries: {low:.3f} / {middle:.3f} / {high:.3f} s (n = 5)")


if __name__ == "__main__":
    main()

"""How fast the live page is, in a real Chromium: first paint, lag, the rank grid, memory.

.venv/bin/python benchmarks/live_page.py [--runs 10] [--steps 100000] [--ranks 4096]
                                         [--pictures DIR]

Writes runs that never ran to a temporary folder, serves them with `paceline watch`, and opens them.
Goals: first paint 1 s with 100,000 steps a curve and 10 runs, lag 1 s, 60 frames a second of a grid
of 4,096 ranks drawn anew each frame. Prints JSON: seconds, unless a name says otherwise. `cold` is
before the server has read a run, `warm` afterwards; both from the start of the navigation until the
curves and the grid are on the screen; of several runs, `first_paint` is when the first of them is.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.live.browser import PROGRAM, Page, browser
from tests.live.folder import append, write_run
from tests.report import made

from paceline.record.run import RunFolder

_STEP_S = 0.2
"""Of the run that grows: five steps a second."""

_LAG_S = 15.0
"""For how long its updates are watched."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    if PROGRAM is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            write(Path(folder) / f"run-{i}", asked.steps, asked.ranks) for i in range(asked.runs)
        ]
        command = [sys.executable, "-m", "paceline", "watch", "--runs", folder, "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found is not None
        try:
            print(json.dumps(measure(found[0], runs, asked.pictures, server.pid), indent=2))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def measure(address: str, runs: list[RunFolder], pictures: Path | None, pid: int) -> dict[str, Any]:
    """Every figure."""
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    keys = [run.path.name for run in runs]
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    with browser() as page:
        page.go(f"{address}#nothing")  # the browser's own start is not the page's
        result["first_paint_cold"] = paint(page, f"{address}#{keys[0]}")
        result["first_paint_warm"] = [paint(page, f"{address}#{keys[0]}") for _ in range(5)]
        # Those that the server has not read yet come first.
        result["all_runs_cold"] = paint(page, f"{address}#{','.join(keys[::-1])}")
        result["all_runs_cold_first_paint"] = round(float(page.js("window.begun")) / 1000, 3)
        result["all_runs_warm"] = [paint(page, f"{address}#{','.join(keys)}") for _ in range(3)]
        result["browser_bytes_with_all_runs"] = memory(page)
        if pictures is not None:
            page.picture(pictures / "runs.png")
        paint(page, f"{address}#{keys[0]}")
        result["lag"] = lag(page, runs[0])
        result["grid"] = grid(page)
        result["browser_bytes"] = memory(page)
        result["server_bytes"] = resident_bytes(pid)
        result["errors"] = page.wrong
        if pictures is not None:
            page.picture(pictures / "run.png")
    return result


def write(path: Path, steps: int, ranks: int) -> RunFolder:
    """A run of many steps and ranks that goes on."""
    import msgspec

    begin = made.started()
    events = [msgspec.structs.replace(begin, num_ranks=ranks, num_nodes=max(1, ranks // 8))]
    run = write_run(path, made.record([*events, made.training(1, 1)], name=path.name))
    for first in range(1, steps + 1, 10_000):
        last = min(first + 10_000, steps + 1)
        append(run.metrics_file, [made.line(s, s * _STEP_S) for s in range(first, last)])
    return run


def paint(page: Page, url: str) -> float:
    """Seconds from the start of a navigation until everything is drawn."""
    page.call("Page.navigate", url="about:blank")
    page.until("location.href === 'about:blank'")
    page.go(url)
    return round(float(page.until("window.painted")) / 1000, 3)


def lag(page: Page, run: RunFolder) -> dict[str, float]:
    """Seconds from a step's time to its being on the screen, while steps are written."""
    page.js("window.lag.length = 0")
    ended = threading.Event()
    step = int(page.js("runs.get(shown[0]).tables[0].step.at(-1)"))

    def grow() -> None:
        for more in range(1, int(_LAG_S / _STEP_S)):
            append(run.metrics_file, [made.line(step + more, time.time() - made.T0)])
            if ended.wait(_STEP_S):
                return

    writer = threading.Thread(target=grow)
    writer.start()
    writer.join()
    ended.set()
    seen = sorted(page.until("window.lag.length > 10 && window.lag"))
    worst = seen[math.ceil(0.99 * len(seen)) - 1]
    return {"median": round(statistics.median(seen), 3), "p99": round(worst, 3), "num": len(seen)}


def grid(page: Page) -> dict[str, float]:
    """Frames a second while other ranks are marked, and everything is drawn, in every frame."""
    return page.js(
        """(async () => {
          const all = ranks(), took = [], stamps = [], end = performance.now() + 4000;
          await new Promise(done => { const frame = at => {
            stamps.push(at); const begin = performance.now();
            all.odd = Array.from({ length: 100 }, () => ({ rank: Math.random() * all.num | 0,
              state: ['slow', 'stuck', 'lost'][Math.random() * 3 | 0], phase: '', step: 1,
              text: '' }));
            drawGrid(); took.push(performance.now() - begin);
            begin < end ? requestAnimationFrame(frame) : done();
          }; requestAnimationFrame(frame); });
          took.sort((a, b) => a - b); const n = stamps.length - 1;
          return { ranks: all.num, frames_per_s: Math.round(n / (stamps[n] - stamps[0]) * 1000),
            frame_ms: took[n >> 1], frame_p99_ms: took[Math.floor(n * .99)] };
        })()"""
    )


def memory(page: Page) -> dict[str, int]:
    """Bytes of the page's script, and of all processes of the browser together."""
    page.call("HeapProfiler.collectGarbage")
    heap = page.call("Runtime.getHeapUsage")["usedSize"]
    return {"script": int(heap), "processes": sum(map(resident_bytes, children(os.getpid())))}


def children(pid: int) -> list[int]:
    """Processes below one, the server left out."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, ahead = [], [pid]
    while ahead:
        below = parents.get(ahead.pop(), [])
        ahead += below
        found += [each for each in below if "chrom" in name_of(each)]
    return found


def name_of(pid: int) -> str:
    """A process's program, or nothing once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Its share of memory (PSS), where what several have counts once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024  # type: ignore[index]


if __name__ == "__main__":
    main()

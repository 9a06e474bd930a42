"""Draw one recovery of a run, as on its page: the picture in docs/recovery.md.

.venv/bin/python benchmarks/recovery_plot.py RUN docs/recovery.svg
"""

import sys
from pathlib import Path

from paceline.record.events import read_events
from paceline.record.metrics import read_all_metrics
from paceline.report.recovery_plot import draw_recovery, recovery_to_show


def main() -> None:
    """Write the picture."""
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    events = read_events(run / "events.jsonl")
    shown = recovery_to_show(events)
    if shown is None:
        raise SystemExit(f"{run} had nothing to recover from")
    out.write_text(draw_recovery(shown, events, read_all_metrics(run / "metrics.jsonl")))


if __name__ == "__main__":
    main()

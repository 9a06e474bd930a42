"""Runs' folders on the disk, written from records that never ran."""

from pathlib import Path

import msgspec

from paceline.job import dump_job
from paceline.plan import plan_to_json
from paceline.record.gather import RunRecord
from paceline.record.run import RunFolder, RunInfo


def write_run(path: Path, record: RunRecord) -> RunFolder:
    """A folder that says what a record says."""
    run = RunFolder(path)
    run.logs.mkdir(parents=True)
    info = RunInfo(name=record.name, job_folder=str(path), created_at=record.created_at)
    run.info_file.write_bytes(msgspec.json.encode(info))
    run.job_file.write_text(dump_job(record.spec), encoding="utf-8")
    if record.plan is not None:
        run.plan_file.write_bytes(plan_to_json(record.plan))
    append(run.events_file, record.events)
    append(run.metrics_file, record.metrics)
    return run


def append(path: Path, lines) -> None:
    """Add lines to a file of JSON lines."""
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

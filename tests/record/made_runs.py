"""Folders of runs, made without running anything."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {"decoder": {"layers": 2, "hidden": 32}},
    "train": {"steps": 100, "learning_rate": 0.003, "deterministic": "auto", "seed": 0},
    "data": {"path": "text", "seq_len": 32},
}
PLAN: dict[str, Any] = {
    "cluster": {"accelerator": "cpu", "num_nodes": 1, "ranks_per_node": 2},
    "layout": {"data": 2, "micro_batch": 4},
    "estimate": {"memory": {"parts": {"parameters": 100, "overhead": 900}}, "step_s": 0.5},
    "engine": "paceline",
    "cost": {"per_instance_hour_usd": 3.0, "num_instances": 2},
}
AT = 1_795_000_000.0


def make_run(
    folder: Path,
    *,
    events: Iterable[Mapping[str, Any]] = (),
    losses: Iterable[float | None] = (),
    job: Mapping[str, Any] = JOB,
    plan: Mapping[str, Any] | None = PLAN,
    created_at: float = AT,
    lines: Mapping[str, Any] | None = None,
) -> Path:
    """A run's folder, whose steps have these losses.

    Args:
        lines: More fields of every line of the metrics.
    """
    folder.mkdir(parents=True)
    info = {"name": job["name"], "job_folder": str(folder.parent), "created_at": created_at}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(job), sort_keys=False))
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    for event in events:
        add_line(folder / "events.jsonl", event)
    for number, loss in enumerate(losses, 1):
        line = {"step": number, "generation": 1, "at": AT + number, "loss": loss}
        more = {"tokens_per_s": 1000.0 + number, "step_s": 0.25, "memory_bytes": 10 * number}
        add_line(folder / "metrics.jsonl", {**line, **more, **(lines or {})})
    return folder


def add_line(path: Path, value: Mapping[str, Any]) -> None:
    """One more line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def job_with(**train: Any) -> dict[str, Any]:
    """The job with other settings of `train`."""
    return {**JOB, "train": {**JOB["train"], **train}}


def started(at: float = AT, *, layout: str = "DDP over 2 ranks", **more: Any) -> dict[str, Any]:
    """The line of a start."""
    size = {"num_ranks": 2, "num_nodes": 1, "num_steps": 100}
    return {"event": "RunStarted", "at": at, "layout": layout, "versions": {}, **size, **more}


def evaluated(step: int, loss: float | None) -> dict[str, Any]:
    """The line of an evaluation."""
    return {"event": "Evaluated", "at": AT + step, "step": step, "loss": loss, "seconds": 0.1}


def finished(at: float = AT + 100, outcome: str = "finished", **more: Any) -> dict[str, Any]:
    """The line of an end."""
    line = {"event": "RunFinished", "at": at, "outcome": outcome, "step": 100, "restarts": 0}
    return {**line, "state_digest": "ab12", "peak_bytes": [500, 700], **more}

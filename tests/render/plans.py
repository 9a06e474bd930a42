"""Plans of many layouts for the tests of engines."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.job import Job, parse_job
from paceline.plan import Plan, plan_job
from paceline.render import Rendered, render_job

JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {"decoder": {"layers": 4, "hidden": 256, "heads": 8}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "network": "400Gb/s"},
    "train": {"global_batch": 64, "steps": 100, "precision": "bf16"},
}


def planned(**changes: Any) -> tuple[Plan, Job]:
    """The plan of the job above with sections changed: `planned(layout={"sharding": "full"})`."""
    return _planned(json.dumps(changes))


@cache
def _planned(changes: str) -> tuple[Plan, Job]:
    """Once for each job that a process plans: tests of several engines render the same."""
    job = job_of(**json.loads(changes))
    return plan_job(job), job


def job_of(**changes: Any) -> Job:
    """The job above with sections changed; of the tiny model, DDP without a pipeline where nothing
    else is asked."""
    if not changes.keys() & {"model", "engine"}:
        changes["layout"] = {"sharding": "none", "pipeline": 1} | changes.get("layout", {})
    spec = JOB | {
        name: JOB.get(name, {}) | section if isinstance(section, dict) else section
        for name, section in changes.items()
    }
    return parse_job(yaml.safe_dump(spec), source="job.yaml", folder=Path.cwd())


def rendered(to: str, **changes: Any) -> Rendered:
    """The files of an engine for `planned`."""
    return render_job(to, *planned(**changes))

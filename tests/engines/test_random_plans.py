"""Engines' own code reads what was planned and rendered for them: random jobs, the same layout."""

import json
import os

import pytest
from tests.engines.runs import start, write_files
from tests.render.random_jobs import RENDERER, random_job

from paceline.errors import PacelineError
from paceline.plan import plan_job
from paceline.render import check_files, check_release, render_job

HERE = os.path.dirname(__file__)
PACKAGES = {
    "deepspeed": ("deepspeed",),
    "accelerate": ("accelerate",),
    "fsdp1": ("accelerate",),
    "torchtitan": ("torchtitan", "torch"),
    "megatron": ("megatron-core", "torch"),
}
PLANS = 12


def plans_of(engine):
    """The first plans of random jobs for an engine."""
    found, number = [], 0
    while len(found) < PLANS:
        number += 1
        try:
            job = random_job(number - 1, engine)
            plan = plan_job(job)
        except PacelineError:
            continue
        if check_release(plan) is None and not list(check_files(plan, job)):
            found.append((plan, job))
    return found


@pytest.mark.engine(validated="random plans: read back as the same layout by the engine's code")
@pytest.mark.parametrize("engine", sorted(PACKAGES))
def test_the_engine_reads_the_layout_that_was_planned(python_with, tmp_path, engine):
    python = python_with(*PACKAGES[engine])
    folders, planned = [], []
    for number, (plan, job) in enumerate(plans_of(engine)):
        files = render_job(RENDERER.get(engine, engine), plan, job).files
        if engine in RENDERER.values() and "ds_config.json" in files:
            continue
        folder = write_files(files, tmp_path / str(number))
        (folder / "ranks").write_text(str(plan.cluster.num_ranks))
        folders.append(str(folder))
        planned.append(plan.layout)
    environment = {"DS_ACCELERATOR": "cpu"}
    command = [str(python), "-W", "ignore", f"{HERE}/read_plans.py", engine, *folders]
    output = start(command, tmp_path, python=python, environment=environment)
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    assert len(said) == len(planned)
    for layout, found in zip(planned, said, strict=True):
        expected = {name: getattr(layout, name) for name in found if name != "shard"}
        if "shard" in found:
            expected["shard"] = layout.shard_degree
        assert expected == found

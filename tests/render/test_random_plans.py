"""A plan for an engine renders, fits by its own estimate, and comes back as the same layout; or the
planner says what to change. `benchmarks/engine_plans.py` does the same to 500 plans."""

from pathlib import Path

import pytest
import yaml
from tests.render.random_jobs import (
    ENGINES,
    RENDERER,
    layout_words,
    planned_words,
    random_job,
    random_spec,
    unsaid,
)

from paceline.errors import PacelineError
from paceline.job import parse_job
from paceline.plan import plan_job
from paceline.render import (
    RenderError,
    check_files,
    check_release,
    render_job,
    renderer_of,
)

NUMBERS = range(40)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_renders_fits_and_is_read_back_as_the_same_layout(number):
    try:
        job = random_job(number)
        plan = plan_job(job)
        RenderError.raise_for([*check_files(plan, job)])
    except PacelineError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert all(problem.fix for problem in refused.problems)
        return
    engine = RENDERER.get(job.spec.engine, job.spec.engine)
    if (estimated_only := check_release(plan)) is not None:
        assert plan.cautions[0].what == estimated_only.what
        with pytest.raises(PacelineError, match="does not write its files"):
            render_job(engine, plan, job)
        return
    found = render_job(engine, plan, job)
    words = layout_words(job.spec.engine, found.files)
    planned = planned_words(plan, words)
    assert planned == {name: words[name] for name in planned}
    assert plan.estimate.memory.known_bytes <= plan.limit_bytes
    assert unsaid(found.gaps) == []


def test_what_few_blocks_of_a_virtual_stage_recompute_is_read_back():
    # Megatron recomputes so many blocks of each virtual stage: of one block, that one.
    spec = {
        "engine": "megatron",
        "model": {"preset": "mixtral-8x22b"},
        "data": {"path": "data", "seq_len": 4096},
        "cluster": {"accelerator": "H100-SXM", "nodes": 8, "per_node": 8},
        "train": {"global_batch": 256, "steps": 1000},
    }
    job = parse_job(yaml.safe_dump(spec), source="job.yaml", folder=Path.cwd())
    plan = plan_job(job)
    assert plan.layout.recompute == "full"
    words = layout_words("megatron", render_job("megatron", plan, job).files)
    assert words["recompute_every"] == plan.layout.recompute_every


def test_every_engine_is_among_the_random_jobs():
    specs = [random_spec(number) for number in NUMBERS]
    assert {spec["engine"] for spec in specs} == set(ENGINES)
    assert sum("engine_version" in spec for spec in specs) >= 5
    assert sum("attention" in spec["train"] for spec in specs) >= 5


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_with_files_are_known(engine):
    assert renderer_of(engine) == RENDERER.get(engine, engine)

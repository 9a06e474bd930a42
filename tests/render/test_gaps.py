"""Where a gap points: at a field that a job file has."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.render.plans import planned, rendered

import paceline.render
from paceline.job import job_schema
from paceline.render import RenderError, check_files, render_job

FOLDER = Path(paceline.render.__file__).parent


def has_field(key: str) -> bool:
    """Whether a job file may have that key."""
    schema = job_schema()
    at = schema
    for part in key.split("."):
        while "$ref" in at or "anyOf" in at:
            found = at["anyOf"] if "anyOf" in at else [schema["$defs"][at["$ref"].split("/")[-1]]]
            at = next((each for each in found if "$ref" in each or "properties" in each), {})
        at = at.get("properties", {}).get(part)
        if at is None:
            return False
    return True


def keys(file: Path) -> Iterator[str]:
    """What `where` is set to in a module; a part that is filled in is left out with its dot."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "where":
            yield from texts(node.value)
        if isinstance(node, ast.Assign):
            yield from assigned(node)


def assigned(node: ast.Assign) -> Iterator[str]:
    (target, value) = (node.targets[0], node.value)
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for name, given in pairs:
        if isinstance(name, ast.Name) and name.id == "where":
            yield from texts(given)


def texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value.partition(",")[0]
    if isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
        yield str(value.values[0].value).partition(",")[0].rstrip(".")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_a_gap_names_a_key_of_the_job_file(file):
    unknown = [key for key in keys(file) if not has_field(key)]
    assert [key for key in unknown if not key.startswith("--")] == []


def test_the_check_finds_a_key_that_there_is_not(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text('what, where = "x", "layout.shard_degree"\nGap(where="layout.tensor")\n')
    assert [has_field(key) for key in keys(file)] == [False, True]


@pytest.mark.parametrize(
    ("engine", "changes", "key"),
    [
        ("megatron", {"program": "train.py:main"}, "program"),
        ("megatron", {"train": {"adapter": {"kind": "lora"}}}, "train.adapter"),
        ("torchtitan", {"train": {"precision": "fp16"}}, "train.precision"),
        ("mlx", {}, "cluster.accelerator"),
        ("tensorflow", {"layout": {"tensor": 2}}, "layout.tensor"),
        ("accelerate", {"layout": {"pipeline": 2}}, "layout.pipeline"),
        ("deepspeed", {"layout": {"sharding": "hybrid", "shard": 8}}, "layout.sharding"),
    ],
)
def test_a_refusal_says_which_key_asks_for_it(engine, changes, key):
    with pytest.raises(RenderError) as refused:
        rendered(engine, **changes)
    assert any(problem.where.startswith(f"{key}, job.yaml") for problem in refused.value.problems)


@pytest.mark.parametrize(("engine", "name"), [("deepspeed", "deepspeed"), ("fsdp1", "accelerate")])
def test_what_the_example_program_lacks_is_done_with_the_engines_own_launcher(engine, name):
    plan, job = planned(engine=engine, train={"adapter": {"kind": "lora"}})
    problems = check_files(plan, job, own_program=False)
    (problem,) = [each for each in problems if "adapters" in each.what]
    assert f"`paceline run --script train.py --with {name} JOB` (on Kubernetes" in problem.fix


def test_files_that_do_not_start_the_plans_engine_say_what_does():
    asked = {"engine": "megatron", "engine_path": "/shared/Megatron-LM"}
    plan, job = planned(**asked, layout={"tensor": 2})
    first, *others = render_job("slurm", plan, job).gaps
    assert first.what == "engine megatron"
    assert "paceline run JOB --on slurm" in first.fix
    assert {gap.fix for gap in others if gap.where.startswith("layout.")} == {""}
    plan, job = planned(**asked, layout={"pipeline": 2})
    with pytest.raises(RenderError) as refused:
        render_job("kubernetes", plan, job)
    assert all("paceline run JOB --on kubernetes" in each.fix for each in refused.value.problems)
    assert all(gap.where != "engine" for gap in render_job("megatron", plan, job).gaps)

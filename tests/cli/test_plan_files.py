"""`paceline plan` and the files of the job's engine: what keeps them from being written, and which
release they are for."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import cli

JOB = """\
model: {preset: falcon-7b}
data: {path: x, seq_len: 1024}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 100}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def plan(job_file: Path, engine: str, *words: str):
    return CliRunner().invoke(cli, ["plan", str(job_file), "--set", f"engine={engine}", *words])


@pytest.mark.parametrize("words", [(), ("--json",), ("--md",), ("--all", "3")])
def test_a_plan_whose_files_cannot_be_written_is_not_printed(job_file, words):
    done = plan(job_file, "megatron", *words)
    assert done.stdout == ""
    (problem,) = done.exception.problems
    assert (problem.code, done.exception.exit_code) == ("H002", 3)
    assert problem.what.startswith("megatron cannot express the model falcon-7b")
    assert problem.fix.startswith("set engine to accelerate or deepspeed")
    assert plan(job_file, "deepspeed").exit_code == 0


def test_what_plan_refuses_has_no_price(job_file):
    """`cost` priced a plan that no engine would run, without a word of it."""
    done = CliRunner().invoke(cli, ["cost", str(job_file), "--set", "engine=megatron"])
    assert done.stdout == ""
    assert [each.code for each in done.exception.problems] == ["H002"]


def test_such_a_model_is_said_before_what_would_make_it_fit(job_file):
    one = ("--set", "cluster.accelerator=T4", "--set", "cluster.per_node=1")
    done = plan(job_file, "megatron", *one)
    assert [each.code for each in done.exception.problems] == ["H002", "P001"]


DEEPSEEK = """
model: {preset: deepseek-v2}
data: {seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 32, per_node: 8}
train: {global_batch: 1920, steps: 500, precision: fp8}
"""


def test_engines_that_refuse_the_job_too_are_not_named_for_a_model_of_none(job_file):
    """Both were named; 1,920 samples are no whole number for each of 256 data ranks."""
    job_file.write_text(DEEPSEEK)
    (problem,) = plan(job_file, "megatron").exception.problems
    assert problem.fix.startswith("no other engine takes this job as it is (accelerate: L014, ")
    assert "; deepspeed: L01" in problem.fix
    assert "set engine" not in problem.fix
    assert problem.fix.endswith("deepseek_v2.py yourself, which Paceline does not plan")
    assert "Megatron Core chooses by the sum of the best few" in problem.what


def test_an_engine_for_which_the_job_does_not_fit_either_takes_one_line_of_the_fix(job_file):
    """P001's table of memory by part stood in the middle of it."""
    job_file.write_text(DEEPSEEK.replace("nodes: 32", "nodes: 1").replace("fp8", "bf16"))
    problem = plan(job_file, "megatron").exception.problems[0]
    assert problem.code == "H002"
    assert ": P001, no layout fits on 1 node x 8 H100-SXM" in problem.fix
    assert "\n" not in problem.fix


@pytest.mark.parametrize(
    ("model", "has", "fix"),
    [
        ("gemma-2-9b", "; torchtitan 0.3 has no module for it", "with any model"),
        ("mixtral-8x22b", "; torchtitan 0.3 has no module for it", "with any model"),
        ("deepseek-v2-lite", "; torchtitan 0.3 has no module for it", "with any model"),
        ("deepseek-v3", "gpt-oss", "--module deepseek_v3 yourself, which Paceline does not plan"),
    ],
)
def test_torchtitan_is_said_to_have_the_models_that_it_has(job_file, model, has, fix):
    """Each was sent to "the --module of the model's own family", where there is none."""
    job_file.write_text(DEEPSEEK.replace("deepseek-v2", model).replace("1920", "2048"))
    problems = plan(job_file, "torchtitan").exception.problems
    problem = next(each for each in problems if each.code == "H002")
    assert problem.what.endswith(has)
    assert problem.fix.endswith(fix)


def test_an_engine_whose_files_lack_the_model_is_not_what_makes_it_fit(job_file):
    """P001 named megatron, which refused the same model in the sentence before."""
    job_file.write_text(DEEPSEEK)
    wider = ("--set", "train.global_batch=2048", "--set", "train.precision=bf16")
    wider += ("--set", "cluster.nodes=1")
    done = plan(job_file, "accelerate", *wider)
    problem = done.exception.problems[-1]
    assert problem.code == "P001"
    named = problem.fix.partition("set engine to ")[2].split()[0]
    assert named == "deepspeed"
    disk = ("--set", "layout.offload_path=/scratch")
    assert plan(job_file, named, *wider, *disk).exit_code == 0
    # A node of 8 H100 is no 8 desktop machines.
    assert "GB10" not in problem.fix


def test_an_engine_whose_files_can_be_written_says_nothing(job_file):
    for model in ("llama-3-8b", "falcon-7b"):
        done = plan(job_file, "deepspeed", "--set", f"model.preset={model}")
        assert (done.exit_code, done.stderr) == (0, "")


def test_a_model_that_the_example_program_lacks_is_a_note(job_file):
    length = ("--set", "data.seq_len=512")
    done = plan(job_file, "deepspeed", "--set", "model.preset=bert-large", *length)
    assert done.exit_code == 0
    assert done.stderr.startswith("note: H002: deepspeed cannot express the model bert-large")
    assert "paceline run --script train.py --with" in done.stderr


def test_a_plan_for_accelerators_that_the_engines_files_are_not_for_is_not_printed(job_file):
    for engine, accelerator in (("mlx", "H100-SXM"), ("torchtitan", "TPU-v5p")):
        words = ("--set", f"cluster.accelerator={accelerator}", "--set", "model.preset=llama-3-8b")
        done = plan(job_file, engine, *words)
        assert done.stdout == ""
        assert {each.code for each in done.exception.problems} == {"H002"}


LLAMA = ("--set", "model.preset=llama-3-8b")


@pytest.mark.parametrize(
    ("engine", "instead"),
    [
        ("torchtune", "torchtitan"),
        ("automodel", "torchtitan"),
        ("nanotron", "megatron"),
        ("internevo", "megatron"),
        ("maxtext", "torchtitan"),
        ("megatron-2021", "megatron"),
        ("torchtitan 0.2.2", "torchtitan 0.3.0"),
    ],
)
def test_an_engine_that_is_only_estimated_is_a_warning_above_the_plan_and_refused_elsewhere(
    job_file, engine, instead
):
    done = plan(job_file, engine, *LLAMA)
    assert (done.exit_code, done.stderr) == (0, "")
    said = f"Paceline estimates {engine}"
    assert done.stdout.startswith(f"warning     files: {said}")
    assert f"set engine to {instead}, whose files it writes" in done.stdout
    asked = ["--set", f"engine={engine}", *LLAMA]
    rendered = ["render", str(job_file), "--for", engine.split()[0], *asked]
    for words in (rendered, ["run", str(job_file), "--on", "slurm", "--dry-run", *asked]):
        (problem,) = CliRunner().invoke(cli, words).exception.problems
        assert (problem.code, problem.what.startswith(said)) == ("R015", True)
        assert problem.fix.startswith(f"set engine to {instead}, whose files it writes")


@pytest.mark.parametrize(
    ("engine", "nearest", "sets"),
    [
        ("torchtune", "torchtitan", ("model.preset=t5-large",)),
        ("nanotron", "megatron", ("model.preset=bert-large",)),
        ("torchtune", "torchtitan", (*LLAMA[1::2], "train.adapter={kind: qlora, rank: 8}")),
    ],
)
def test_the_engine_that_is_named_instead_plans_this_very_job(job_file, engine, nearest, sets):
    """What was named was the nearest, whatever the job, and then refused it."""
    words = [word for each in ("data.seq_len=512", *sets) for word in ("--set", each)]
    warning = " ".join(plan(job_file, engine, *words).stdout.partition("layout ")[0].split())
    assert "was not checked fix:" in warning
    assert plan(job_file, nearest, *words).exit_code != 0
    asked = ["--set", f"engine={engine}", *words]
    dry = ["run", str(job_file), "--on", "slurm", "--dry-run", *asked]
    # The files of an engine that a job does not name are asked for as well.
    rendered = ["render", str(job_file), "--for", engine, *words]
    for asked_for in (dry, rendered):
        (problem,) = CliRunner().invoke(cli, asked_for).exception.problems
        assert problem.code == "R015"
        assert f"fix: {problem.fix}" in warning
    named = problem.fix.partition("set engine to ")[2].partition(",")[0]
    if named:
        assert plan(job_file, named, *words).exit_code == 0
    else:
        assert problem.fix.startswith("no engine whose files it writes takes this job as it is")


def test_an_engine_that_is_only_estimated_names_no_other_that_does_not_train_there(job_file):
    done = plan(job_file, "maxtext", *LLAMA, "--set", "cluster.accelerator=TPU-v5p")
    assert done.exit_code == 0
    assert "set engine to" not in done.stdout.partition("layout")[0]


def test_the_release_that_is_planned_is_on_the_screen_in_json_and_in_the_files(job_file):
    for engine, release in (("megatron", "0.16.1"), ("megatron core_v0.14", "0.14")):
        assert f"on megatron {release}\n" in plan(job_file, engine, *LLAMA).stdout
        found = json.loads(plan(job_file, engine, *LLAMA, "--json").stdout)
        assert (found["engine"], found["engine_version"]) == ("megatron", release)
    words = ["--for", "megatron", *LLAMA, "--set", "engine=megatron core_v0.14"]
    done = CliRunner().invoke(cli, ["render", str(job_file), *words])
    assert "a checkout of NVIDIA/Megatron-LM at core_v0.14.0" in done.stdout


def test_flags_that_a_release_lacks_are_refused_with_the_one_that_has_them(job_file):
    words = ("--set", "layout.pipeline=8", "--set", "cluster.nodes=64", *LLAMA[:1])
    found = {
        release: plan(job_file, f"megatron {release}", *words, "model.preset=llama-3-405b")
        for release in ("0.12.0", "0.13.0")
    }
    assert found["0.13.0"].exit_code == 0
    (problem,) = found["0.12.0"].exception.problems
    assert problem.code == "H002"
    assert "its flags are there since core_v0.13.0" in problem.what
    assert problem.fix == "engine: megatron 0.13.0, or a newer one"


def test_a_newer_patch_is_planned_with_a_warning(job_file):
    done = plan(job_file, "torchtitan 0.3.4", *LLAMA)
    assert done.exit_code == 0
    assert "version: torchtitan 0.3.4 is planned as 0.3.0 is" in done.stdout
    assert "version:" not in plan(job_file, "torchtitan 0.3.0", *LLAMA).stdout


def test_what_the_files_do_not_use_of_the_jobs_training_is_printed_beside_the_plan(job_file):
    """A DeepSpeed plan with a bucket printed nothing of it until `render`."""
    bucket = ("--set", "train.bucket=50MB")
    done = plan(job_file, "deepspeed", *bucket)
    assert (done.exit_code, done.stdout[:6]) == (0, "layout")
    assert done.stderr.startswith("left out: train.bucket: 50000000: nothing in these files sets")
    assert "fix: leave train.bucket out" in done.stderr
    assert plan(job_file, "deepspeed").stderr == ""
    whole = ("--set", "layout.sharding=none", "--set", "model.preset=llama-3.2-1b")
    assert plan(job_file, "accelerate", *bucket, *whole).stderr == ""


@pytest.mark.parametrize("engine", ["accelerate", "fsdp1"])
def test_a_bucket_is_given_a_layout_that_reduces_in_buckets_where_the_engine_has_one(
    job_file, engine
):
    """Accelerate got ZeRO-2, which left the bucket out."""
    sets = ("model.preset=llama-3.2-1b", "cluster.nodes=2", "train.bucket=50MB")
    done = plan(job_file, engine, *(word for each in sets for word in ("--set", each)))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "train.bucket is of the all-reduce of whole gradients" in done.stdout


NOWHERE = """\
name: big
model: {preset: llama-2-13b}
engine: torchtitan
cluster: {accelerator: L4, per_node: 1, host_memory: 512GiB}
train: {global_batch: 8, steps: 10}
data: {seq_len: 2048}
"""


@pytest.mark.parametrize("verb", [("advise", "batch"), ("prove",), ("verify",), ("simulate",)])
def test_every_verb_that_plans_names_the_engine_that_plan_names(tmp_path, verb):
    """Only plan, render, run and cost did."""
    path = tmp_path / "big.yaml"
    path.write_text(NOWHERE)
    fixes = [
        CliRunner().invoke(cli, [*words, str(path)]).exception.problems[-1].fix
        for words in (("plan",), verb)
    ]
    assert fixes[0].startswith("set engine to ")
    assert fixes[0] == fixes[1]


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_files_of_an_engine_that_the_job_does_not_name_are_of_a_plan_for_it(tmp_path, engine):
    """They were of Paceline's own plan, whose selective recompute they left out: too big a rank."""
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        "model: {preset: qwen2.5-14b}\ndata: {seq_len: 4096}\n"
        "cluster: {accelerator: A100-80, nodes: 3, per_node: 8}\n"
        "train: {global_batch: 192, steps: 5000}\n"
    )
    words = ["render", str(job_file), "--for", engine, "--json"]
    found = [
        json.loads(CliRunner().invoke(cli, [*words, *more]).stdout)["files"]["train.json"]
        for more in ([], ["--set", f"engine={engine}"])
    ]
    assert found[0] == found[1]
    assert '"selective"' not in found[0]

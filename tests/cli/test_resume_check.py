"""`paceline run --resume PATH --check` and `run --from`: what is said before the launch."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.preflight.test_here import JOB
from tests.record.test_tensors import write

from paceline.cli.run import command
from paceline.cli.run_job import begin_with, find_source
from paceline.errors import CheckpointError, JobError
from paceline.job import load_job, make_script
from paceline.plan import plan_job
from paceline.profile.fitting import decoder_tensors
from paceline.profile.resolve import resolve_decoder
from paceline.record.checkpoints import newest_valid
from paceline.record.placement import Placement, write_placement
from paceline.record.run import RunFolder, create_run, create_script_run
from paceline.record.tensors import TensorRecord


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def new_run(job_file: Path) -> RunFolder:
    job = load_job(job_file)
    return create_run(job, plan_job(job), folder=job_file.parent / "run", runs=job_file.parent)


def check(*words: object) -> tuple[int, dict]:
    """Exit code and verdict."""
    said = CliRunner().invoke(
        command, [*map(str, words), "--check", "--json"], standalone_mode=False
    )
    if said.exception is not None:
        raise said.exception
    return said.return_value, json.loads(said.output)


def test_a_run_goes_on_from_its_newest_whole_checkpoint_in_another_layout(job_file):
    run = new_run(job_file)
    write(run.checkpoints, 1)
    (write(run.checkpoints, 2) / "COMMIT").write_text("0")
    code, said = check("--resume", run.path, "--set", "cluster.per_node=1")
    assert (code, said["fit"]) == (0, "compatible")
    assert said["checkpoint"].endswith("step-00000001")
    assert "1 rank:" in said["wants"]
    assert any("step-00000002" in each for each in said["why"])


def test_a_run_that_would_train_something_else_says_which_field(job_file):
    run = new_run(job_file)
    write(run.checkpoints, 1)
    code, said = check("--resume", run.path, "--set", "train.seed=5")
    assert (code, said["fit"]) == (5, "not")
    assert said["why"][0].startswith("R005: train.seed was 0")


def test_a_run_without_a_checkpoint_cannot_go_on(job_file):
    code, said = check("--resume", new_run(job_file).path)
    assert (code, said["fit"]) == (5, "not")
    assert "begin anew" in said["why"][-1]


def test_a_run_is_judged_where_it_was(job_file):
    run = new_run(job_file)
    write(run.checkpoints, 1)
    write_placement(run.path, Placement(place="slurm", job_id="7"))
    cluster = ("--set", "cluster.accelerator=H100-SXM", "--set", "cluster.nodes=2")
    assert check("--resume", run.path, *cluster)[0] == 0
    here = check("--resume", run.path, *cluster, "--on", "local")[1]
    assert here["why"][0].startswith("R011")


def test_a_run_of_another_program_is_left_to_that_program(job_file):
    script = make_script({"name": "x", "command": ["python", "x.py"]}, job_file.parent)
    run = create_script_run(script, folder=job_file.parent / "run", runs=job_file.parent)
    with pytest.raises(click.UsageError, match="only it knows its checkpoints"):
        check("--resume", run.path)


def resume(*words: object) -> None:
    CliRunner().invoke(
        command, [*map(str, words), "--dry-run"], standalone_mode=False, catch_exceptions=False
    )


def test_a_job_file_that_would_train_something_else_resumes_no_run(job_file):
    run = new_run(job_file)
    other = job_file.with_name("other.yaml")
    other.write_text(JOB.replace("train: {", "train: {seed: 5, "))
    with pytest.raises(JobError, match=r"R005: train.seed was 0 and would become 5"):
        resume(other, "--resume", run.path)


def test_the_run_of_a_script_is_resumed_without_a_job_file(job_file):
    script = make_script({"name": "x", "command": ["python", "x.py"]}, job_file.parent)
    run = create_script_run(script, folder=job_file.parent / "run", runs=job_file.parent)
    with pytest.raises(JobError, match="resumed as it was started\n  where: JOB"):
        resume(job_file, "--resume", run.path)


def test_a_checkpoint_in_a_runs_place_is_answered_with_the_way_to_begin_from_it(job_file):
    step = write(job_file.parent / "elsewhere", 3)
    with pytest.raises(JobError, match=rf"it is a checkpoint(?s:.)*paceline run JOB --from {step}"):
        resume(job_file, "--resume", step)


def test_another_programs_checkpoint_is_judged_by_the_jobs_engine(job_file):
    step = job_file.parent / "ds/global_step10"
    step.mkdir(parents=True)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    for name in ("mp_rank_00_model_states.pt", *names):
        (step / name).touch()
    (step.parent / "latest").write_text("global_step10")
    code, said = check(job_file, "--resume", step.parent)
    assert (code, said["fit"]) == (1, "convertible")
    assert said["commands"][-1] == f"paceline run {job_file} --from start/step-00000000"


@pytest.mark.parametrize("what", ["nothing", "a file", "other things"])
def test_what_is_no_checkpoint_is_refused(job_file, what):
    path = job_file.parent / "there"
    if what == "a file":
        path.touch()
    elif what == "other things":
        (path / "sub").mkdir(parents=True)
    with pytest.raises(JobError, match="C011"):
        check(job_file, "--resume", path)


def test_a_new_run_begins_with_the_checkpoint_that_it_is_given(job_file, monkeypatch):
    holds(monkeypatch, weights_of(load_job(job_file)))
    run, given = new_run(job_file), write(job_file.parent / "elsewhere", 3)
    begin_with(run, find_source(given, load_job(job_file), "local"))
    newest, refused = newest_valid(run.checkpoints)
    assert newest is not None
    assert (newest.step, refused) == (3, [])


def test_a_checkpoint_of_the_last_step_begins_no_run(job_file):
    steps = load_job(job_file).spec.train.steps
    given = write(job_file.parent / "elsewhere", steps)
    with pytest.raises(JobError, match=rf"R008: .* is at step {steps}, and train.steps is {steps}"):
        find_source(given, load_job(job_file), "local")


def weights_of(job):
    """The table of a checkpoint of the job's built-in decoder."""
    shape = resolve_decoder(job)
    return {f"model/{name}": size for name, size in decoder_tensors(shape).items()}


def holds(monkeypatch, weights):
    table = {n: TensorRecord(size=s, dtype="float32", pieces=()) for n, s in weights.items()}
    monkeypatch.setattr("paceline.record.tensors.read_tensors", lambda path: table)


def test_weights_by_other_names_than_the_built_in_decoders_begin_no_run(job_file, monkeypatch):
    given = write(job_file.parent / "elsewhere", 3)
    holds(monkeypatch, {"model/transformer.h.0.attn": (4, 4)})
    with pytest.raises(JobError, match=r"R005: .* other names .*transformer\.h\.0\.attn"):
        find_source(given, load_job(job_file), "local")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model/blocks.0.ffn.up.weight": (7, 5)}, r"another shape: .*up_proj.weight \(7 x 5, not"),
        ({"model/norm.weight": None}, "not in the files: model.norm.weight"),
        (
            {"model/blocks.99.ffn.up.weight": (4, 4)},
            "of the files are not in the model: model.layers.99",
        ),
    ],
    ids=["another size", "one is missing", "more blocks"],
)
def test_weights_of_other_sizes_than_the_jobs_decoder_begin_no_run(
    job_file, monkeypatch, change, said
):
    given = write(job_file.parent / "elsewhere", 3)
    weights = weights_of(load_job(job_file)) | change
    holds(monkeypatch, {name: size for name, size in weights.items() if size is not None})
    with pytest.raises(JobError, match=rf"M013: .*{said}(?s:.)*--from: {given}\n  fix: give a job"):
        find_source(given, load_job(job_file), "local")


def test_a_damaged_checkpoint_begins_no_run(job_file):
    given = write(job_file.parent / "elsewhere", 3)
    (given / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError):
        find_source(given, load_job(job_file), "local")

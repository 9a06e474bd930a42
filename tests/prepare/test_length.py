"""Epochs of real data: counted by every verb that reads a job, and kept by the run."""

import json

import pytest
from click.testing import CliRunner
from tests.prepare.conftest import a_chat, write_rows

from paceline.cli.data import command as data_command
from paceline.cli.job_input import count_samples_at, read_job
from paceline.cli.plan import command as plan_command
from paceline.cli.run_job import _own_job
from paceline.errors import JobError
from paceline.plan import plan_job
from paceline.record.run import create_run

BYTES = """
model: {decoder: {layers: 1, hidden: 8, heads: 1}}
train: {global_batch: 2, epochs: 2}
data: {path: text.txt, seq_len: 16, held_out: 0}
"""

CHATS = """
model:
  decoder: {layers: 1, hidden: 8, heads: 1, vocab: 512}
  tokenizer: %s
train: {global_batch: 2, epochs: 3}
data:
  seq_len: 64
  held_out: 0
  sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]
"""


@pytest.fixture
def text_job(tmp_path):
    (tmp_path / "text.txt").write_text("x" * 161)  # ten samples, and the last target
    path = tmp_path / "job.yaml"
    path.write_text(BYTES)
    return path


@pytest.fixture
def chat_job(tmp_path, tokenizer_folder):
    question = "What is one plus two? " * 3
    for name, count in (("a", 4), ("b", 6)):
        rows = [a_chat(f"{number} {question}", "It is three.") for number in range(count)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    path = tmp_path / "job.yaml"
    path.write_text(CHATS % tokenizer_folder)
    return path


def test_plan_prints_the_steps_that_it_made_of_bytes(text_job):
    result = CliRunner().invoke(plan_command, [str(text_job)], catch_exceptions=False)
    assert "train.steps = 10: 2 epochs of 10 samples at 2 a step" in result.output


def test_plan_prepares_the_data_and_says_how_often_each_source_is_read(chat_job):
    runner = CliRunner()
    result = runner.invoke(plan_command, [str(chat_job), "--json"], catch_exceptions=False)
    length = json.loads(result.stdout)["length"]
    samples = {source["name"]: source["samples"] for source in length["sources"]}
    assert length["steps"] == -(-3 * sum(samples.values()) // 2)
    index = runner.invoke(data_command, ["prepare", str(chat_job), "--json"]).stdout
    assert samples == {each["name"]: each["samples"] for each in json.loads(index)["train"]}
    text = runner.invoke(plan_command, [str(chat_job)], catch_exceptions=False).output
    drawn = 2 * length["steps"]
    assert f"a is read {drawn * 0.75 / samples['a']:.3g} times" in " ".join(text.split())


def test_data_that_are_not_here_are_an_error_that_names_the_other_ways(text_job):
    (text_job.parent / "text.txt").unlink()
    with pytest.raises(JobError) as caught:
        read_job(text_job)
    (problem,) = caught.value.problems
    assert problem.code == "D001"
    assert problem.fix.endswith(
        "give train.steps or train.tokens instead of train.epochs to plan without the data"
    )


def test_epochs_are_not_counted_at_places_that_read_no_file_of_this_machine(text_job):
    with pytest.raises(JobError) as caught:
        read_job(text_job, count=count_samples_at("kubernetes"))
    (problem,) = caught.value.problems
    assert problem.code == "W027"
    assert problem.fix == "give train.steps or train.tokens"


def test_a_resumed_run_keeps_its_steps_and_what_they_were_made_of(text_job, tmp_path):
    job = read_job(text_job)
    run = create_run(job, plan_job(job), folder=tmp_path / "run", runs=tmp_path)
    assert run.job().spec.train.steps == 10
    (text_job.parent / "text.txt").write_text("x" * 321)
    same = _own_job(run, run.job(), ("checkpoint.keep_last=2",), "local")
    assert (same.spec.train.steps, same.length) == (10, job.length)
    longer = _own_job(run, run.job(), ("train.epochs=3",), "local")
    assert longer.spec.train.steps == 30
    assert plan_job(longer).length == longer.length
    shorter = _own_job(run, run.job(), ("train.steps=7",), "local")
    assert plan_job(shorter).length is None

"""The length of a run: steps, or what epochs and tokens make of them."""

from pathlib import Path

import pytest

from paceline.errors import JobError, Problem
from paceline.job import Job, SourceSize, dump_job, parse_job

TEXT = """\
model:
  decoder: {layers: 2, hidden: 32, heads: 2}
data: {path: x, seq_len: 16}
train:
  global_batch: 32
"""


def read(given: str, *overrides: str, sources: tuple[SourceSize, ...] | None = None) -> Job:
    return parse_job(
        TEXT + given,
        source="job.yaml",
        folder=Path("/nowhere"),
        overrides=overrides,
        count=None if sources is None else lambda job: sources,
    )


def only(given: str, *overrides: str) -> Problem:
    with pytest.raises(JobError) as caught:
        read(given, *overrides)
    (problem,) = caught.value.problems
    return problem


def of(*samples: int, weights: tuple[float, ...] = ()) -> tuple[SourceSize, ...]:
    given = weights or (None,) * len(samples)
    names = ("chats", "faq", "books")
    return tuple(
        SourceSize(name=name, samples=size, weight=weight)
        for name, size, weight in zip(names, samples, given, strict=False)
    )


def test_epochs_become_steps_rounded_up_to_a_whole_one():
    job = read("  epochs: 2\n", sources=of(1234))
    assert job.spec.train.steps == 78
    assert str(job.length) == "2 epochs of 1,234 samples at 32 a step"


def test_part_of_an_epoch_is_counted_as_it_is_written_and_not_as_binary_rounds_it():
    assert read("  epochs: 0.7\n", sources=of(320)).spec.train.steps == 7


def test_a_run_has_a_step_even_when_its_samples_are_fewer_than_a_batch():
    assert read("  epochs: 0.01\n", sources=of(3)).spec.train.steps == 1


def test_epochs_of_weighted_sources_say_how_often_each_is_read():
    job = read("  epochs: 1\n", sources=of(3200, 1600, weights=(3.0, 1.0)))
    assert job.spec.train.steps == 150
    assert job.length is not None
    assert job.length.passes == {"chats": 4800 * 0.75 / 3200, "faq": 4800 * 0.25 / 1600}
    assert str(job.length).endswith("; by weight, chats is read 1.12 times, faq is read 0.75 times")


def test_sources_without_weights_are_all_read_alike():
    job = read("  epochs: 3\n", sources=of(3200, 1600))
    assert job.length is not None
    assert job.length.passes == {"chats": 3.0, "faq": 3.0}
    assert "weight" not in str(job.length)


def test_tokens_become_steps_without_reading_data():
    job = read("  tokens: 10M\n")
    assert job.spec.train.steps == 19532  # 10,000,000 / (32 x 16) = 19,531.25
    assert str(job.length) == "10,000,000 tokens at 512 a step"


def test_the_resolved_job_has_steps_alone_and_reads_back():
    job = read("  epochs: 2\n", sources=of(1234))
    again = parse_job(dump_job(job.spec), source="job.yaml", folder=Path("/nowhere"))
    assert again.spec == job.spec
    assert (again.spec.train.steps, again.spec.train.epochs) == (78, None)


def test_a_setting_of_the_command_line_replaces_the_files_length():
    assert read("  epochs: 2\n", "train.steps=50").spec.train.steps == 50
    job = read("  steps: 50\n", "train.epochs=2", sources=of(1234))
    assert job.spec.train.steps == 78


def test_a_job_without_a_length_is_refused():
    problem = only("")
    assert problem.code == "J005"
    assert problem.fix == "add train.steps: 1000, or train.epochs: 2, or train.tokens: 10M"


def test_two_lengths_are_refused():
    problem = only("  steps: 100\n  epochs: 2\n")
    assert problem.code == "J007"
    assert problem.what == (
        "the length of the run is given 2 times: train.steps 100 and train.epochs 2"
    )
    assert problem.where == "train.epochs, job.yaml line 7"
    assert only("", "train.steps=5", "train.tokens=10").fix == "keep one of them"


@pytest.mark.parametrize("given", ["epochs: 2", "tokens: 10M"])
def test_a_program_with_data_of_its_own_is_given_steps(given):
    problem = only(f"  {given}\nprogram: own:train\n")
    assert problem.what.endswith("cannot be counted: program own:train reads its own data")
    assert problem.fix.startswith("give train.steps")


def test_another_engines_epochs_are_refused_and_its_tokens_are_not():
    problem = only("  epochs: 2\nengine: megatron\n")
    assert problem.fix == "give train.steps or train.tokens"
    assert read("  tokens: 512\nengine: megatron\n").spec.train.steps == 1


def test_epochs_without_anybody_to_count_are_refused():
    assert only("  epochs: 2\n").what == (
        "train.epochs is counted from the data, which are not read here"
    )


def test_rules_of_the_steps_are_checked_once_they_are_known():
    given = "  epochs: 2\n  schedule: wsd\n  decay_steps: 60\n  warmup_steps: 50\n"
    with pytest.raises(JobError, match="more than the run's 78 steps"):
        read(given, sources=of(1234))
    assert only("  tokens: 1000000000000000000\n").where == "train.tokens, job.yaml line 6"


@pytest.mark.parametrize("given", ["epochs: 0", "epochs: -1", "epochs: yes", "tokens: 0"])
def test_a_length_that_is_none_is_refused(given):
    assert only(f"  {given}\n").code == "J006"

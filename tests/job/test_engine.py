"""How a job names its engine, and which releases it may ask for."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.catalog.engines import find_engine, load_engines
from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.job.engine import ENGINE_NAMES, is_before, read_engine, series
from paceline.job.load import dump_job

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
train: {global_batch: 64, steps: 100}
"""


def job_of(*overrides: str) -> Job:
    return parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


@pytest.mark.parametrize(
    ("written", "engine"),
    [
        ("megatron", ("megatron", "")),
        ("Megatron-LM core_v0.16.1", ("megatron", "0.16.1")),
        ("megatron core_r0.16.0", ("megatron", "0.16.0")),
        ("megatron-core==0.14.0", ("megatron", "0.14.0")),
        ("torchtitan v0.3.0", ("torchtitan", "0.3.0")),
        ("torchtitan 0.3", ("torchtitan", "0.3")),
        ("torchtitan 0.2", ("torchtitan", "0.2")),
        ("deepspeed@0.17.2", ("deepspeed", "0.17.2")),
        ("nemo automodel", ("automodel", "")),
        ("fsdp2", ("paceline", "")),
        ("transformers", ("accelerate", "")),
    ],
)
def test_an_engine_is_named_in_the_ways_that_people_write_it(written, engine):
    assert read_engine(written, where="engine") == engine
    spec = job_of(f"engine={written}").spec
    assert (spec.engine, spec.engine_version) == engine


@pytest.mark.parametrize(
    ("written", "said", "fix"),
    [
        ("megatron 0.5", "older than 0.12.0", "plans for 0.16.1; or name one from 0.12.0"),
        ("megatron core_r0.9.0", "megatron 0.9.0 is older than 0.12.0", "0.12.0 to 0.19.0"),
        ("deepspeed 0.10", "older than 0.16.0", "`engine: deepspeed` plans for"),
        ("accelerate 0.20", "older than 1.10.0", "leave the version out"),
        ("torchtitan 9.9", "newer than 0.3.0", "plans for 0.3.0"),
        ("torchtitan 0.2.1", "older than 0.2.2", "leave the version out"),
        ("torchtune 9.9", "newer than 0.7.0", "plans for 0.7.0"),
        ("torchtitan 0.4.0.dev1", "newer than 0.3.0", "leave the version out"),
        ("torchtitan 0.x", "`0.x` is no version", "leave the version out"),
        ("transformers 5.23", "5.23 is a version of transformers", "`engine: accelerate`"),
        ("maxtext 2025.1", "nobody noted which release of maxtext", "`engine: maxtext`"),
        ("paceline 2", "the one that is installed", "`engine: paceline`"),
        ("torchtian", "there is no engine `torchtian`", "did you mean `torchtitan`?"),
        ("deepspeed-chat", "there is no engine", "deepspeed"),
        ("''", "there is no engine ``", "Known are paceline"),
    ],
)
def test_a_release_without_known_facts_is_refused_with_those_that_have_them(written, said, fix):
    with pytest.raises(JobError) as caught:
        job_of(f"engine={written}")
    (problem,) = caught.value.problems
    assert problem.code == "J026"
    assert said in problem.what
    assert fix in problem.fix
    assert problem.where == "engine, --set"


def test_a_version_may_stand_apart_and_is_given_once():
    spec = job_of("engine=torchtitan", "engine_version='0.2.2'").spec
    assert (spec.engine, spec.engine_version) == ("torchtitan", "0.2.2")
    with pytest.raises(JobError, match=r"engine_version 0\.3\.0"):
        job_of("engine=torchtitan 0.2.2", "engine_version='0.3.0'")


def test_a_version_that_yaml_reads_as_a_number_is_asked_for_in_quotes():
    with pytest.raises(JobError, match="a version is text") as caught:
        job_of("engine=megatron", "engine_version=0.14")
    (problem,) = caught.value.problems
    assert problem.fix.endswith("""in quotes a number is text: --set 'engine_version="0.14"'""")
    text = "engine: megatron\nengine_version: 0.14\ntrain: {global_batch: 8, steps: 1}\n"
    with pytest.raises(JobError, match="a version is text") as caught:
        parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    assert caught.value.problems[-1].fix.endswith('text: engine_version: "0.14"')


def test_a_job_that_is_written_again_has_the_same_engine():
    spec = job_of("engine=Megatron-LM core_v0.14").spec
    again = parse_job(dump_job(spec), source="job.yaml", folder=Path("/nowhere")).spec
    assert (again.engine, again.engine_version) == ("megatron", "0.14")


def test_names_and_facts_are_of_the_same_engines():
    assert list(ENGINE_NAMES) == list(load_engines())


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_the_release_that_is_planned_was_read_and_has_the_newest_facts(name):
    row = ENGINE_NAMES[name]
    assert bool(row.read) == bool(row.planned)
    if row.read is not None:
        first, last = row.read
        assert not is_before(row.planned, first)
        assert not is_before(last, row.planned)
        assert replace(find_engine(name, row.planned), version="") == find_engine(name)
    if row.read is not None and row.files is not None:
        assert not is_before(row.files[0], row.read[0])
        assert series(row.files[1]) <= series(row.read[1])
    assert bool(row.instead) == (row.files is None and name != "paceline")
    assert not row.instead or ENGINE_NAMES[row.instead].files is not None


def test_no_spelling_is_of_two_engines():
    spelled = [each for row in ENGINE_NAMES.values() for each in (*row.names, *row.like)]
    assert len(spelled) == len(set(spelled))
    assert all(name in row.names and name == name.lower() for name, row in ENGINE_NAMES.items())

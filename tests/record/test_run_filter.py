"""The expressions of `paceline runs --where`."""

import pytest
from tests.record.made_runs import AT, evaluated, job_with, make_run, started

from paceline.errors import JobError
from paceline.record.query import find_runs
from paceline.record.run_filter import read_where

RUN = {
    "run": "tiny-1",
    "state": "failed",
    "layout": "FSDP 2 x tensor 2",
    "eval_loss": 1.5,
    "loss": None,
    "restarts": 2,
    "memory_bytes": 12 << 30,
    "ran_s": 7200.0,
    "dirty": True,
    "commit": "00123",
    "train.learning_rate": 0.0003,
    "train.epochs": None,
    "model.factory": "auto",
    "tags": ["a", "b"],
}


@pytest.mark.parametrize(
    "text",
    [
        "eval_loss<2",
        "eval_loss<2 and layout~FSDP",
        "layout ~ fsdp",
        "eval_loss<1 or restarts>=2",
        "eval_loss < 1 or eval_loss > 1 and restarts = 2",
        "not state=finished",
        "not (state=finished or state=running)",
        "state='failed'",
        'layout="FSDP 2 x tensor 2"',
        "train.learning_rate=3e-4",
        "train.learning_rate<=0.0003",
        "memory_bytes>10GiB and ran_s>1.5h",
        "loss=none",
        "loss!=2",
        "dirty=true",
        "commit=00123",
        "run!=tiny-2",
        "((restarts==2))",
        "model.factory=AUTO",
        "tags~b",
        "NOT loss=1 AND run=tiny-1",
    ],
)
def test_it_holds(text):
    assert read_where(text).holds(RUN.get)


@pytest.mark.parametrize(
    "text",
    [
        "eval_loss<1",
        "loss<2",
        "not loss!=2",
        "loss>=0",
        "train.epochs>1",
        "model.factory>1",
        "state~finish and eval_loss<2",
        "eval_loss<2 and (restarts=0 or restarts=1)",
        "dirty=false",
        "eval_loss=none",
        "commit=123",
    ],
)
def test_it_does_not_hold(text):
    assert not read_where(text).holds(RUN.get)


@pytest.mark.parametrize(
    ("text", "what", "at"),
    [
        ("", "name of a field", 1),
        ("eval_loss", "one of < <= >", 10),
        ("eval_loss<", "a value is expected after `eval_loss<`", 11),
        ("eval_loss<2 layout~FSDP", "`and`, `or` or the end", 13),
        ("eval_loss<2 and", "name of a field", 16),
        ("(eval_loss<2", "`)` is expected", 13),
        ("eval_loss<2)", "`and`, `or` or the end", 12),
        ("eval_loss<abc", "`abc` is not a number", 11),
        ("step=five", "`five` is not a number", 6),
        ("loss==nan", "`nan` is not a number", 7),
        ("state<2", "`state` is a text", 7),
        ("memory_bytes>10parsecs", "", 14),
        ("state='open", "no part of an expression", 7),
        ("=2", "name of a field", 1),
        ("a=1 and !", "no part of an expression", 9),
        ("(" * 60 + "a=1", "deeper than 50", 51),
        ("not " * 5000 + "a=1", "longer than 2000", 2001),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place_and_the_fields(text, what, at):
    with pytest.raises(JobError) as refused:
        read_where(text)
    (problem,) = refused.value.problems
    assert problem.code == "R070"
    assert what in problem.what
    assert problem.where.startswith(f"character {at} of ")
    assert "eval_loss, " in problem.fix


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for number, rate in enumerate((0.1, 0.3, 0.2)):
        make_run(
            tmp_path / f"runs/r{number}",
            job=job_with(learning_rate=rate),
            events=[started(), *([evaluated(10, 2.0 + number)] if number else [])],
            created_at=AT + number,
        )
    return tmp_path / "runs"


def found(runs, **asked):
    return [row.run for row in find_runs(runs, **asked).rows]


def test_runs_are_chosen_by_fields_and_settings_and_put_in_order(runs):
    assert found(runs) == ["r0", "r1", "r2"]
    assert found(runs, where="train.learning_rate>=0.2") == ["r1", "r2"]
    assert found(runs, sort="-train.learning_rate") == ["r1", "r2", "r0"]
    assert found(runs, sort="state,-created_at", last=2) == ["r1", "r0"]


def test_a_run_without_the_value_comes_last_in_either_direction(runs):
    assert found(runs, sort="eval_loss") == ["r1", "r2", "r0"]
    assert found(runs, sort="-eval_loss") == ["r2", "r1", "r0"]


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"where": "state=new and eval_los<2"}, "character 15"),
        ({"where": "train.learning_rat<2"}, "character 1"),
        ({"sort": "-eval_los"}, "--sort"),
        ({"columns": ["run", "train.learning_rat"]}, "--columns"),
    ],
)
def test_a_name_that_nobody_knows_is_refused_with_the_nearest_and_all_fields(runs, asked, where):
    with pytest.raises(JobError, match="R071") as refused:
        find_runs(runs, **asked)
    (problem,) = refused.value.problems
    assert problem.where.startswith(where)
    assert "did you mean" in problem.fix
    assert "planned_step_s" in problem.fix

"""The section `alerts`, in a job and in a file of its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import JobError
from paceline.job import dump_job, parse_job
from paceline.job.alerts import AlertSpec
from paceline.job.load import load_alerts

JOB = {
    "model": {"preset": "llama-3-8b"},
    "data": {"path": "x"},
    "train": {"global_batch": 8, "steps": 10},
}
GOOD: dict[str, Any] = {
    "rules": [
        {"name": "high", "metric": "train/loss", "above": 10, "steps": 5, "on_alert": "stop"},
        {"name": "hot", "metric": "gpu/temperature_c", "above": 85, "lasting": "1m", "to": ["ops"]},
        {"name": "lost", "event": "WorkerLost", "again": "never", "to": ["mail", "console"]},
        {"name": "flat", "metric": "eval/loss", "plateau": {"patience": 3}},
    ],
    "targets": {
        "ops": {"slack": "env:OPS_URL"},
        "mail": {
            "smtp": "mail.example.org:587",
            "sender": "me@example.org",
            "recipients": ["you@example.org"],
            "user": "me",
            "password": "env:MAIL_PASSWORD",
        },
    },
}


def written(folder: Path, alerts: Any) -> Path:
    path = folder / "rules.yaml"
    path.write_text(alerts if isinstance(alerts, str) else yaml.safe_dump(alerts, sort_keys=False))
    return path


def problems(folder: Path, alerts: Any, *, of_script: bool = False) -> list[Any]:
    with pytest.raises(JobError) as raised:
        load_alerts(written(folder, alerts), of_script=of_script)
    return list(raised.value.problems)


def test_rules_are_the_same_in_a_job_and_in_a_file_of_their_own(tmp_path: Path):
    job = parse_job(yaml.safe_dump(JOB | {"alerts": GOOD}), source="job.yaml", folder=tmp_path)
    alerts, _ = load_alerts(written(tmp_path, GOOD), of_script=False)
    assert job.spec.alerts == alerts
    again = parse_job(dump_job(job.spec), source="job.yaml", folder=tmp_path)
    assert again.spec.alerts == alerts


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ({"metric": "train/loss"}, "says nothing of train/loss"),
        ({"above": 1}, "needs either `metric` or `event`"),
        ({"metric": "train/loss", "event": "WorkerLost", "above": 1}, "either `metric` or `event`"),
        ({"event": "WorkerLost", "above": 1}, "is on an event"),
        ({"event": "WorkerLost", "steps": 2}, "is on an event"),
        ({"metric": "eval/loss", "plateau": {"patience": 2}, "above": 1}, "another condition"),
        ({"metric": "eval/loss", "plateau": {"patience": 2}, "lasting": "1h"}, "another condition"),
        (
            {
                "metric": "eval/loss",
                "plateau": {"patience": 2},
                "when": {"metric": "gpu/power_w", "above": 1},
            },
            "another condition",
        ),
        ({"metric": "train/loss", "above": 1, "when": {"metric": "gpu/power_w"}}, "no limit"),
        ({"metric": "train/loss", "above": 1, "to": ["nobody"]}, "no target 'nobody'"),
        (
            {"metric": "eval/loss", "plateau": {"patience": 2}, "on_alert": "stop"},
            "is early stopping",
        ),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused_at_its_place(
    tmp_path: Path, rule: dict[str, Any], what: str
):
    (problem,) = problems(tmp_path, {"rules": [{"name": "mine"} | rule]})
    assert problem.code == "J016"
    assert what in problem.what
    assert "rules[0]" in problem.where
    assert "rules.yaml line 2" in problem.where or "line" in problem.where


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ({}, "is given 0 ways"),
        ({"webhook": "env:A", "slack": "env:B"}, "is given 2 ways"),
        ({"webhook": "env:A", "sender": "me"}, "keys of a mail server"),
        ({"smtp": "localhost", "sender": "a", "recipients": ["b"]}, "has no port"),
        ({"smtp": "localhost:25", "sender": "a"}, "lacks an address"),
        ({"smtp": "h:25", "sender": "a", "recipients": ["b"], "user": "u"}, "logs in with half"),
    ],
)
def test_a_target_that_cannot_be_reached_is_refused(
    tmp_path: Path, target: dict[str, Any], what: str
):
    (problem,) = problems(tmp_path, {"targets": {"ops": target}})
    assert problem.code == "J016"
    assert what in problem.what


def test_a_script_saves_by_itself(tmp_path: Path):
    rule = {"name": "a", "metric": "train/loss", "above": 1, "on_alert": "checkpoint"}
    (problem,) = problems(tmp_path, {"rules": [rule]}, of_script=True)
    assert "saves by itself" in problem.what
    load_alerts(written(tmp_path, {"rules": [rule]}), of_script=False)


def test_unknown_keys_name_the_nearest_also_in_lists_and_targets(tmp_path: Path):
    text = "rules:\n- {name: a, metrc: train/loss, above: 1}\ntargets:\n  ops: {slak: env:A}\n"
    first, second = problems(tmp_path, text)
    assert (first.code, first.fix) == ("J004", "did you mean `metric`?")
    assert first.where == "rules[0].metrc, " + str(tmp_path / "rules.yaml") + " line 2"
    assert (second.code, second.fix) == ("J004", "did you mean `slack`?")


SECRET = "T0PSECRET"
PLANTED = [
    {"targets": {"ops": {"slack": f"https://hooks.example.org/{SECRET}"}}},
    {"targets": {"ops": {"slack": SECRET}}},
    {"targets": {"ops": {"webhook": [f"https://hooks.example.org/{SECRET}"]}}},
    {"targets": {"ops": f"https://hooks.example.org/{SECRET}"}},
    {"targets": {"ops": {"webhok": f"https://hooks.example.org/{SECRET}"}}},
    {"targets": {"m": {"smtp": f"smtp://u:{SECRET}@h:25", "sender": "a", "recipients": ["b"]}}},
    {"targets": {"m": {"smtp": "h:25", "user": "u", "password": SECRET}}},
    {"to": [f"https://hooks.example.org/{SECRET}"]},
    {"rules": [{"name": "a", "metric": "train/loss", "above": 1, "to": [f"https://x/{SECRET}"]}]},
]


@pytest.mark.parametrize("alerts", PLANTED, ids=range(len(PLANTED)))
def test_an_address_or_a_password_in_a_file_is_refused_and_never_shown(
    tmp_path: Path, alerts: dict[str, Any]
):
    for found in (
        problems(tmp_path, alerts),
        _of_job(tmp_path, yaml.safe_dump(JOB | {"alerts": alerts})),
    ):
        assert {problem.code for problem in found} == {"J013"}
        assert SECRET not in " ".join(map(str, found))


def _of_job(folder: Path, text: str) -> list[Any]:
    with pytest.raises(JobError) as raised:
        parse_job(text, source="job.yaml", folder=folder)
    return list(raised.value.problems)


def test_a_rule_reads_as_one_expression():
    rule = AlertSpec(name="a", metric="gpu/power_share", below=0.35, lasting=120.0)
    assert rule.condition == "gpu/power_share < 0.35 for 120 s"
    assert AlertSpec(name="a", event="WorkerLost").condition == "event WorkerLost"

"""`paceline selftest` tries what this machine has, and says what it did not show."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.command import run_command

from paceline.cli import cli
from paceline.errors import JobError
from paceline.job import load_job
from paceline.launch import selftest
from paceline.launch.selftest import choose_ranks, run_selftest
from paceline.plan import plan_job
from paceline.topology import FoundGpu, Machine

CPUS = Machine(
    num_cores=2, clock_hz=None, simd_bytes=None, has_bf16=False,
    memory_bytes=2**34, available_bytes=2**33, gpus=(),
)  # fmt: skip


def with_gpus(count: int) -> Machine:
    gpus = tuple(FoundGpu(name="NVIDIA L4", memory_bytes=24 * 2**30) for _ in range(count))
    return Machine(
        num_cores=2, clock_hz=None, simd_bytes=None, has_bf16=False,
        memory_bytes=2**34, available_bytes=2**33, gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "asked", "on_cpu", "chosen"),
    [
        (CPUS, None, False, ("cpu", 2)),
        (with_gpus(4), None, False, ("auto", 4)),
        (with_gpus(16), None, False, ("auto", 8)),
        (with_gpus(4), 2, False, ("auto", 2)),
        (with_gpus(4), None, True, ("cpu", 2)),
    ],
)
def test_every_gpu_takes_part_and_two_ranks_where_there_is_none(machine, asked, on_cpu, chosen):
    assert choose_ranks(machine, asked, on_cpu=on_cpu) == chosen


def test_more_ranks_than_gpus_are_refused_with_both_numbers():
    with pytest.raises(JobError) as refused:
        choose_ranks(with_gpus(2), 4, on_cpu=False)
    (problem,) = refused.value.problems
    assert problem.code == "R063"
    assert "4 ranks were asked for; 2 GPUs are visible here" in problem.what


def test_gpus_that_cannot_be_seen_are_not_replaced_by_cpus():
    lost = replace(CPUS, why_no_gpus="nvidia-smi ends with 15: GPU is lost")
    with pytest.raises(JobError, match="T006"):
        choose_ranks(lost, None, on_cpu=False)
    assert choose_ranks(lost, None, on_cpu=True) == ("cpu", 2)


def test_a_folder_that_cannot_be_used_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "mine").touch()
    for keep, why in (("/proc/none", "no such file or directory"), (".", "directory not empty")):
        done = run_command("selftest", "--keep", keep, "--json", folder=tmp_path)
        (problem,) = json.loads(done.stdout)["problems"]
        assert (done.returncode, problem["code"], problem["where"]) == (2, "R002", "--keep")
        assert why in problem["what"]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_refused_and_is_not_the_current_folder(tmp_path, empty):
    for arguments in (("selftest", "--keep", empty), ("runs", "--runs", empty)):
        done = run_command(*arguments, folder=tmp_path)
        assert done.returncode == 2
        assert "it is empty; name a file or folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def answers(monkeypatch, **by_verb):
    asked = []

    def command(verb: str, *words: str):
        asked.append((verb, *words))
        return by_verb[verb]

    monkeypatch.setattr(selftest, "_command", command)
    return asked


FIT = (0, {"results": [{"name": "torch", "status": "pass", "evidence": "", "fix": ""}]}, "")


def drilled(*, ok: bool):
    check = {"name": "state", "ok": ok, "says": "sha256 differs"}
    return (0 if ok else 1), {"checks": [check], "steps_lost": 0, "run": "runs/x"}, ""


def test_a_state_that_differs_after_the_kill_fails_and_is_shown(monkeypatch, tmp_path):
    asked = answers(monkeypatch, preflight=FIT, drill=drilled(ok=False))
    found = run_selftest(with_gpus(2), "auto", 2, tmp_path, lambda text: None)
    assert not found.is_passed
    assert "sha256 differs" in found.checks[1].found
    assert any("kill rank=1" in word for word in asked[1])
    assert found.device == "2 x NVIDIA L4"


def test_a_machine_that_is_not_fit_starts_no_run(monkeypatch, tmp_path):
    bad = {"name": "driver", "status": "fail", "evidence": "driver 1 is too old", "fix": "newer"}
    asked = answers(monkeypatch, preflight=(1, {"results": [bad]}, ""))
    found = run_selftest(with_gpus(2), "auto", 2, tmp_path, lambda text: None)
    assert [verb for verb, *_ in asked] == ["preflight"]
    assert not found.is_passed
    assert found.checks[0].found == "driver: driver 1 is too old (fix: newer)"


def test_a_command_that_gives_no_answer_is_a_fail(monkeypatch, tmp_path):
    answers(monkeypatch, preflight=FIT, drill=(1, {}, "Traceback: boom"))
    found = run_selftest(CPUS, "cpu", 2, tmp_path, lambda text: None)
    assert not found.is_passed
    assert found.checks[1].found == "Traceback: boom"
    assert found.not_shown[0].startswith("GPUs and NCCL")


def test_what_it_asks_of_preflight_and_drill_is_what_they_take(monkeypatch, tmp_path):
    asked = answers(monkeypatch, preflight=FIT, drill=drilled(ok=True))
    assert run_selftest(CPUS, "cpu", 2, tmp_path, lambda text: None).is_passed
    assert [verb for verb, *_ in asked] == ["preflight", "drill"]
    for verb, *words in asked:
        with cli.make_context("paceline", [verb], resilient_parsing=True) as context:
            found = cli.get_command(context, verb)
            given = found.make_context(verb, [*words, "--json"], parent=context).params
        assert given["job_file"] == tmp_path / "job.yaml"
    plan = plan_job(load_job(tmp_path / "job.yaml"))
    assert plan.layout.num_ranks == 2


@pytest.mark.repeat  # `preflight` is in tests/preflight/test_here.py, `drill` in tests/drill
def test_two_ranks_on_cpus_lose_one_and_end_with_the_same_state(tmp_path):
    done = run_command("selftest", "--cpu", "--json", folder=tmp_path, timeout=500)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["passed"]
    assert [check["status"] for check in found["checks"]] == ["pass", "pass"]
    assert "rank 1 killed in step 7, 0 finished steps lost" in found["checks"][1]["found"]
    assert found["not_shown"][0].startswith("GPUs and NCCL")


@pytest.mark.repeat  # what it asks is above
def test_one_rank_runs_twice_and_says_that_recovery_was_not_shown(tmp_path):
    kept = tmp_path / "kept"
    done = run_command(
        "selftest", "--cpu", "--ranks", "1", "--keep", str(kept), folder=tmp_path, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits twice: SHA-256" in done.stdout
    assert "recovery: needs two ranks or more" in done.stdout
    assert (kept / "job.yaml").exists()
    assert Path(kept / "runs" / "run-2" / "metrics.jsonl").exists()

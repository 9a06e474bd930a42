"""`paceline bench --all-reduce` over real ranks, and what it refuses before any is started."""

import json
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner
from tests.command import run_command

from paceline.cli.bench import command
from paceline.errors import JobError, RunError
from paceline.job import load_job
from paceline.launch import sweep as sweeping
from paceline.launch.plannable import planned
from paceline.record.sweep import Sweep, SweepRow

JOB = """
name: tiny
model: {decoder: {layers: 2, hidden: 32, heads: 4}}
data: {corpus: python-stdlib, seq_len: 32}
cluster: {accelerator: cpu, per_node: 2}
train: {global_batch: 8, steps: 10, precision: fp32}
"""


def row(size: int, busbw: float) -> SweepRow:
    return SweepRow(
        bytes=size, seconds=1.0, repeats=3, algbw_bytes_per_s=busbw, busbw_bytes_per_s=busbw
    )


def test_two_ranks_sum_and_their_bandwidths_are_those_of_nccl_tests(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    options = ["--all-reduce", "--ranks", "2", "--max-size", "64KiB", "--json"]
    done = run_command("bench", "job.yaml", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (sweep,) = found["sweeps"]
    assert (sweep["world_size"], sweep["backend"]) == (2, "gloo")
    assert [each["bytes"] for each in sweep["rows"]] == [1024, 4096, 16384, 65536]
    for each in sweep["rows"]:
        assert each["algbw_bytes_per_s"] == pytest.approx(each["bytes"] / each["seconds"])
        assert each["busbw_bytes_per_s"] == pytest.approx(each["algbw_bytes_per_s"] * 2 * 1 / 2)
    assert found["network"]["choice"] == "none"


def test_a_wrong_sum_ends_the_sweep_with_its_rank(monkeypatch):
    text = sweeping.script_text("all_reduce.py")
    broken = text.replace("wanted = world * (world + 1) / 2", "wanted = 0")
    assert broken != text
    monkeypatch.setattr(sweeping, "script_text", lambda name: broken)
    with pytest.raises(RunError, match="the sum of 1024 bytes is not 0"):
        sweeping.sweep_all_reduce(1, max_bytes=1024, limit_s=60)


def test_the_table_says_what_was_reached_of_what_the_plan_takes(monkeypatch, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    rows = (row(1024, 1e9), row(4096, 2e9))
    made = Sweep(world_size=2, backend="gloo", device="cpu", torch="2.13", rows=rows)
    monkeypatch.setattr(sweeping, "sweep_all_reduce", lambda *args, **options: made)
    done = CliRunner().invoke(command, [str(tmp_path / "job.yaml"), "--all-reduce"])
    assert done.exit_code == 0, done.output
    assert "best bus bandwidth: 2 GB/s (measured)" in done.output
    assert "of it were reached" in done.output


def test_s4_7_two_sweeps_are_compared_size_by_size(tmp_path):
    for name, rate, most in (("rdma", 8e9, 3), ("tcp", 1e9, 2)):
        rows = tuple(
            replace(row(4**power * 1024, rate), seconds=4**power * 1024 / rate)
            for power in range(most)
        )
        made = Sweep(world_size=16, backend="nccl", device="H100", torch="2.13", rows=rows)
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(made))
    files = [str(tmp_path / f"{name}.json") for name in ("rdma", "tcp")]
    done = CliRunner().invoke(command, ["--compare", *files])
    assert done.exit_code == 0, done.output
    assert done.output.count("8.00\n") == 2
    assert "tcp takes 8.00 times as long for 1 KiB (latency)" in done.output
    assert "a step is longer by" in done.output.replace("\n", " ")
    swapped = CliRunner().invoke(command, ["--compare", *files[::-1]]).output
    assert "a step is shorter by" in swapped.replace("\n", " ")
    sentence = json.loads(CliRunner().invoke(command, ["--compare", *files, "--json"]).stdout)
    assert sentence["sentence"] in done.output
    whole = (tmp_path / "tcp.json").read_text()
    (tmp_path / "tcp.json").write_text(f'{{"sweeps": [{whole}], "network": null}}')
    assert CliRunner().invoke(command, ["--compare", *files]).output == done.output
    for no_sweep in ("{}", "[]", f'{{"sweeps": [{whole}, {whole}]}}'):
        (tmp_path / "tcp.json").write_text(no_sweep)
        with pytest.raises(JobError, match="is no sweep"):
            CliRunner().invoke(command, ["--compare", *files], catch_exceptions=False)
    assert CliRunner().invoke(command, ["--compare", *files, "--all-reduce"]).exit_code == 2


def test_without_a_job_only_all_reduce_can_be_measured():
    done = CliRunner().invoke(command, ["--ranks", "2"])
    assert done.exit_code == 2
    assert "--all-reduce" in done.output


@pytest.mark.parametrize("size", ["10", "1TiB", "much"])
def test_sizes_that_make_no_sense_are_refused(size):
    done = CliRunner().invoke(command, ["--all-reduce", "--max-size", size])
    assert done.exit_code == 2
    assert "--max-size" in done.output


def test_the_plan_of_another_cluster_says_what_it_expects_there(monkeypatch, tmp_path):
    declared = JOB.replace("accelerator: cpu, per_node: 2", "accelerator: H100-SXM, nodes: 2")
    (tmp_path / "job.yaml").write_text(declared)
    made = Sweep(world_size=2, backend="gloo", device="cpu", torch="2.13", rows=(row(1024, 1e9),))
    monkeypatch.setattr(sweeping, "sweep_all_reduce", lambda *args, **options: made)
    done = CliRunner().invoke(command, [str(tmp_path / "job.yaml"), "--all-reduce"])
    assert done.exit_code == 0, done.output
    assert "and not this machine" in done.output
    assert "between ranks of a node, each rank and direction: 450 GB/s" in done.output
    assert "between nodes, each node and direction: " in done.output


def test_one_rank_alone_is_refused_and_left_out_of_the_usual_numbers(monkeypatch):
    made = Sweep(world_size=2, backend="gloo", device="cpu", torch="2.13", rows=(row(1024, 1e9),))
    asked = []
    monkeypatch.setattr(sweeping, "sweep_all_reduce", lambda n, **_: asked.append(n) or made)
    done = CliRunner().invoke(command, ["--all-reduce", "--ranks", "1,2"])
    assert (done.exit_code, asked) == (2, [])
    assert "one rank sends nothing" in done.output
    assert CliRunner().invoke(command, ["--all-reduce"]).exit_code == 0
    assert asked == [2]


@pytest.mark.parametrize(
    "options",
    [
        ["job.yaml", "--max-size", "1MiB"],
        ["--all-reduce", "--weak"],
        ["--all-reduce", "--out", "x"],
    ],
)
def test_an_option_of_the_other_measurement_is_not_passed_over(options):
    done = CliRunner().invoke(command, options)
    assert done.exit_code == 2
    assert "--all-reduce" in done.output


def test_more_ranks_than_a_machine_can_start_are_refused():
    done = CliRunner().invoke(command, ["--all-reduce", "--ranks", "9" * 20])
    assert isinstance(done.exception, JobError)
    assert "at most 4096" in str(done.exception)


@pytest.mark.parametrize("changes", [[], ["--set", "cluster.accelerator=H100-SXM"]])
def test_s4_7_the_json_has_the_plans_rates_and_the_share_that_was_reached(
    monkeypatch, tmp_path, changes
):
    (tmp_path / "job.yaml").write_text(JOB)
    rows = (row(1024, 1e9), row(4096, 2e9))
    made = Sweep(world_size=2, backend="gloo", device="cpu", torch="2.13", rows=rows)
    monkeypatch.setattr(sweeping, "sweep_all_reduce", lambda *args, **options: made)
    asked = [str(tmp_path / "job.yaml"), "--all-reduce", "--json", *changes]
    expected = json.loads(CliRunner().invoke(command, asked).stdout)["expected"]
    if changes:
        assert expected["reached"] == expected["verdict"] == [None]
        assert "the sweep is of this machine" in expected["reason"]
    else:
        assert expected["reached"] == [pytest.approx(2e9 / expected["link_bytes_per_s"])]
        assert expected["verdict"] == ["no verdict over gloo"]


@pytest.mark.parametrize(("rate", "verdict"), [(0.4, "slow: below 50%"), (0.6, "as expected")])
def test_s4_7_a_sweep_has_the_verdict_of_preflight_in_the_json_and_on_the_screen(
    monkeypatch, tmp_path, rate, verdict
):
    (tmp_path / "job.yaml").write_text(JOB)
    link = planned(load_job(tmp_path / "job.yaml")).cluster.link_bytes_per_s
    rows = (row(4096, rate * link),)
    made = Sweep(world_size=2, backend="nccl", device="H100", torch="2.13", rows=rows)
    monkeypatch.setattr(sweeping, "sweep_all_reduce", lambda *args, **options: made)
    asked = [str(tmp_path / "job.yaml"), "--all-reduce"]
    found = json.loads(CliRunner().invoke(command, [*asked, "--json"]).stdout)["expected"]
    assert found["verdict"] == [verdict]
    assert f"of it were reached, {verdict}" in CliRunner().invoke(command, asked).output

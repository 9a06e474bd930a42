"""`paceline report --md` and `--json`: throughput, memory of ranks, scaling, why the layout."""

import json
from pathlib import Path

import msgspec
import pytest
from click import UsageError
from click.testing import CliRunner
from tests.bench.made import measured, plan_of
from tests.record.made_runs import finished, job_with, make_run, started
from tests.report import made

from paceline.check.bench import judge_bench
from paceline.cli.report import command
from paceline.errors import JobError
from paceline.record.run_row import RunRow
from paceline.report.run_report import parse_bench, report_json, report_markdown, report_of

MIB = 2**20
ROW = RunRow(
    run="tiny-1", name="tiny", folder="runs/tiny-1", state="finished", damage=None, created_at=1.0
)


def call(*args: object) -> str:
    done = CliRunner().invoke(command, [str(arg) for arg in args], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def bench_file(tmp_path: Path) -> Path:
    """What `paceline bench --out` writes, of 1 and 2 ranks."""
    runs = [measured(plan_of(tmp_path, ranks), step_s) for ranks, step_s in ((1, 0.2), (2, 0.11))]
    path = tmp_path / "bench.json"
    path.write_bytes(msgspec.json.encode(judge_bench(runs, "strong")))
    return path


def test_s0_26_a_report_has_throughput_memory_of_each_rank_scaling_and_the_why(bench_file: Path):
    record = made.killed_and_finished()
    report = report_of(record, ROW, parse_bench(bench_file.read_bytes(), "bench.json"))
    end = record.events[-1]
    told = json.loads(report_json(report))
    assert [each["peak_bytes"] for each in told["memory"]] == end.peak_bytes
    assert [each["rank"] for each in told["memory"]] == list(range(len(end.peak_bytes)))
    assert told["run"]["run"] == "tiny-1"
    assert sum(each["share"] for each in told["time"]) == pytest.approx(1)
    assert [row["num_ranks"] for row in told["scaling"]["rows"]] == [1, 2]
    assert told["scaling"]["rows"][1]["efficiency"] == pytest.approx(0.2 / 0.11 / 2)
    plan = record.plan
    assert told["rationale"]["layout"] == plan.layout_name
    assert told["rationale"]["predicted_bytes"]["optimizer"] == 18 * MIB
    assert [each["reason"] for each in told["rationale"]["decisions"]] == [
        each.reason for each in plan.decisions
    ]
    assert [each["reason"] for each in told["rationale"]["others"]] == [
        each.reason for each in plan.rejected
    ]
    text = report_markdown(record, report)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        f"# {record.name}",
        "## Where the time went (measured)",
        "## Memory of each rank (measured)",
        "## Scaling (strong, measured)",
        "## Why this layout (estimated)",
        f"### {plan.layout_name} on {plan.cluster.name}",
    ]
    assert "| 2 | DDP over 2 ranks | 110 ms | 4.65K | 1.82 | 91% | 1000 B |" in text
    assert "| Throughput | " in text
    for decision in plan.decisions:
        assert f"`{decision.field}` = {decision.value}: {decision.reason}" in text


def test_s0_26_a_run_without_end_plan_or_bench_has_a_report_without_them():
    report = report_of(made.record([made.started()], with_plan=False), ROW)
    assert (report.memory, report.rationale, report.scaling) == ([], None, None)
    text = report_markdown(made.record([made.started()], with_plan=False), report)
    assert "There is no plan" in text
    assert "Memory of each rank" not in text


def test_s0_26_the_command_prints_or_writes_either_form(tmp_path: Path, bench_file: Path):
    model = {"decoder": {"layers": 2, "hidden": 32, "heads": 2}}
    job = job_with(global_batch=8) | {"model": model}
    events = [started(), finished()]
    run = make_run(tmp_path / "runs/r", job=job, plan=None, events=events, losses=[3.0, 2.0])
    told = json.loads(call(run, "--json", "--bench", bench_file))
    assert (told["run"]["loss"], len(told["memory"])) == (2.0, 0)
    assert told["scaling"]["rows"][0]["num_ranks"] == 1
    out = tmp_path / "report.md"
    assert str(out) in call(run, "--md", "--out", out)
    assert out.read_text() == call(run, "--md")
    with pytest.raises(UsageError, match="give one of them"):
        call(run, "--md", "--json")
    with pytest.raises(UsageError, match="--bench is for --md and --json"):
        call(run, "--bench", bench_file)
    with pytest.raises(JobError, match=r"R002: .*out cannot be written|cannot be written"):
        call(run, "--md", "--out", tmp_path / "no/report.md")
    (tmp_path / "other.json").write_text('{"rows": 3}')
    with pytest.raises(JobError, match=r"it is no bench\.json"):
        call(run, "--md", "--bench", tmp_path / "other.json")

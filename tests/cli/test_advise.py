"""`paceline advise`: what it prints and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import cli
from paceline.errors import JobError

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 1000}
"""
BUCKETS = "--gradients 28GB --backward 900ms --ranks 64 --bandwidth 50GB/s"


def run(line: str):
    return CliRunner().invoke(cli, ["advise", *line.split()])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "accumulate --batch 64 --data-ranks 2 --max-micro-batch 8",
            "64 = 8 a micro-batch x 4 accumulated x 2 ranks",
        ),
        (
            "accumulate --batch 100 --data-ranks 7 --max-micro-batch 7",
            "nearest      98 or 105: no rounding",
        ),
        ("rate --rate 0.001 --base-batch 64 --batch 512 --optimizer sgd", "0.008, by the linear"),
        ("rate --rate 0.001 --base-batch 64 --batch 512", "0.002828, by the sqrt rule"),
        (f"buckets {BUCKETS}", "bucket_cap_mb=1024"),
        ("checkpoint --save 30s --restart 10m --ranks 16384", "arXiv:2407.21783"),
        ("critical-batch --small 8 5.0 --big 64 1.5", "32 samples a step"),
        ("critical-batch --small 8 1.0 --big 64 1.5", "unknown: the norms are too noisy"),
    ],
)
def test_advice_is_printed_with_its_reason(line: str, said: str):
    done = run(line)
    assert done.exit_code == 0, done.output
    assert said in done.output


@pytest.mark.parametrize(
    "line",
    [
        "accumulate --batch 64 --data-ranks 2 --max-micro-batch 8",
        "rate --rate 0.001 --base-batch 64 --batch 512 --steps 100",
        f"buckets {BUCKETS} --changing",
        "checkpoint --save 30s --restart 10m --ranks 8 --step 2s --background 60s",
        "critical-batch --small 8 5.0 --big 64 1.5",
    ],
)
def test_advice_is_json_when_asked_for(line: str):
    done = run(f"{line} --json")
    assert done.exit_code == 0, done.output
    assert isinstance(json.loads(done.output), dict)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("accumulate --batch 0 --data-ranks 2 --max-micro-batch 8", "x>=1"),
        ("accumulate --batch 64", "Missing option"),
        ("rate --rate -1 --base-batch 64 --batch 512", "x>0"),
        ("rate --rate nan --base-batch 64 --batch 512", "not a number"),
        ("rate --rate inf --base-batch 64 --batch 512", "not a number"),
        (f"buckets {BUCKETS.replace('28GB', '1e999GB')}", "is no finite number"),
        (f"buckets {BUCKETS.replace('28GB', '28')}", "no unit of bytes"),
        ("checkpoint --save 0s --restart 10m --ranks 8", "not above zero"),
        ("checkpoint --save 30 --restart 10m --ranks 8", "not a duration"),
        ("critical-batch --small 8 5.0 --big 4 1.5", "larger than the small one"),
        ("batch nowhere.yaml", "no file nowhere.yaml"),
        ("bacth job.yaml", "No such command"),
    ],
)
def test_wrong_numbers_are_refused_without_a_traceback(line: str, said: str):
    done = run(line)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception or "")
    assert "Traceback" not in done.output


def test_the_batch_finder_finds_the_batch_that_the_memory_allows(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "layout: {tensor: 1, pipeline: 1, context: 1, sharding: full}\n")
    done = CliRunner().invoke(cli, ["advise", "batch", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert 1 <= found["chosen"] <= found["largest"] < 64
    assert dict(found["tried"])[found["largest"]] is True
    assert dict(found["tried"])[found["largest"] + 1] is False
    shorter = CliRunner().invoke(
        cli, ["advise", "batch", str(path), "--set", "data.seq_len=1024", "--json"]
    )
    assert json.loads(shorter.output)["largest"] > found["largest"]


def test_s4_8_a_pipeline_gets_the_batch_of_all_its_micro_batches(tmp_path: Path):
    """It got that of one, which leaves its stages idle and which interleaving refuses."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "layout: {tensor: 1, pipeline: 4, context: 1, sharding: zero1}\n")
    done = CliRunner().invoke(cli, ["advise", "batch", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    planned = CliRunner().invoke(cli, ["plan", str(path), "--json"])
    layout = json.loads(planned.stdout)["layout"]
    assert layout["pipeline"] == 4
    assert found["global_batch"] == found["chosen"] * layout["data"] * layout["accumulation"]
    told = CliRunner().invoke(cli, ["advise", "batch", str(path)]).output
    assert f"samples a step in {layout['accumulation']} micro-batches a pipeline" in told


def test_s4_8_no_batch_is_estimated_of_a_model_whose_memory_is_unknown(tmp_path: Path):
    """4,096 samples a rank were given as estimated, of a model that the plan calls unknown."""
    (tmp_path / "own.py").write_text(
        "from torch import nn\nmake = lambda: nn.Linear(4, 4)\ndef train(session): pass\n"
    )
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {factory: 'own:make'}\nprogram: own:train\n"
        "cluster: {accelerator: cpu, per_node: 2}\ntrain: {global_batch: 8, steps: 10}\n"
    )
    done = CliRunner().invoke(cli, ["advise", "batch", str(path), "--json"])
    assert isinstance(done.exception, JobError), done.output
    (problem,) = done.exception.problems
    assert (problem.code, "unknown" in problem.what) == ("J024", True)

"""`paceline bench` on real ranks, and what it refuses before any is started."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.command import run_command

from paceline.cli.bench import command
from paceline.errors import PacelineError
from paceline.job import parse_job
from paceline.job.job import LayoutSpec
from paceline.launch.bench import adapted, bench_cases, read_ranks
from paceline.record.bench import PHASES

JOB = """
name: tiny
model: {decoder: {layers: 2, hidden: 32, heads: 4}}
data: {path: text.txt, seq_len: 32}
cluster: {accelerator: cpu}
train: {global_batch: 8, steps: 10, precision: fp32}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tmp_path


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", "job.yaml", *options, folder=folder)


def job_in(folder: Path, layout: str = ""):
    text = JOB + (f"layout: {{{layout}}}\n" if layout else "")
    return parse_job(text, source="job.yaml", folder=folder)


def test_a_bench_times_each_number_of_ranks_and_writes_a_page(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ("--ranks", "1,2", "--steps", "3", "--warm-up", "1", "--layout", "tensor=2")
    done = bench(folder, *options, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    one, two = found["rows"]
    assert (one["num_ranks"], two["num_ranks"]) == (1, 2)
    assert two["layout"] == "tensor 2"
    assert one["notes"] == ["layout.tensor 1, not 2"]
    assert set(two["phases_s"]) == set(PHASES)
    spent = sum(two["phases_s"].values())
    assert spent > 0
    assert two["communication_s"] >= two["exposed_s"] > 0
    assert two["peak_bytes"] > 2**26
    assert found["sentence"].startswith("no verdict: ")  # three steps tell nothing
    assert "<svg" in (folder / "out/bench.html").read_text()
    assert json.loads((folder / "out/bench.json").read_text()) == found
    assert "3 timed steps" in done.stderr


@pytest.mark.slow  # much like the one above
def test_a_program_of_ones_own_is_timed_as_it_is(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (folder / "own.py").write_text(
        "import torch\n"
        "def train(session):\n"
        "    model = session.build(lambda: torch.nn.Linear(4, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for step in session.steps(model, optimizer):\n"
        "        for ids in step.micro_batches(64):\n"
        "            step.backward(model(torch.ones(len(ids), 4)).square().mean())\n"
        "        step.apply()\n"
    )
    options = ("--ranks", "1", "--steps", "3", "--set", "program=own:train", "--json")
    done = bench(folder, *options)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["tokens_per_s"] is None
    assert row["samples_per_s"] > 0


@pytest.mark.parametrize("text", ["0", "1,0", "two", "", "1,,2", "-1"])
def test_ranks_that_are_no_numbers_are_refused(text):
    with pytest.raises(PacelineError, match="R040"):
        read_ranks(text)


def test_ranks_are_measured_once_and_fewest_first():
    assert read_ranks(" 4,1, 2,4") == (1, 2, 4)


def test_s0_11_weak_scaling_takes_the_batch_for_the_fewest_ranks(folder):
    cases = bench_cases(job_in(folder), (1, 2), "weak")
    assert [case.plan.layout.global_batch for case in cases] == [8, 16]


def test_more_ranks_than_the_batch_divides_says_on_how_many(folder):
    with pytest.raises(PacelineError) as caught:
        bench_cases(job_in(folder, "tensor: 1, pipeline: 1, context: 1"), (1, 16), "strong")
    assert "--ranks 16" in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_fixed_layout_becomes_the_nearest_that_so_many_ranks_can_have():
    asked = LayoutSpec(tensor=4, data=2, sharding="full", pipeline=2, schedule="gpipe")
    layout, notes = adapted(asked, 2)
    assert (layout.tensor, layout.pipeline, layout.data) == (2, 1, "auto")
    assert (layout.sharding, layout.schedule) == ("auto", "auto")
    assert "layout.tensor 2, not 4" in notes


def test_a_layout_that_is_possible_is_left_alone():
    asked = LayoutSpec(tensor=2, sharding="full")
    assert adapted(asked, 4) == (asked, [])


@pytest.mark.parametrize(
    ("sweep", "why"),
    [
        ("train.steps=5,6", "6 and 5 are the same program on 2 ranks: a bench has its own"),
        ("train.bucket=1KiB,1024B", "1024B and 1KiB are the same program"),
        ("train.bucket=1KiB,1MiB,25MiB", "25MiB and 1MiB are the same program on 2 ranks: one "),
        ("train.bucket=auto,25MiB", "one bucket of either holds all gradients, 169 KiB"),
        ("layout.data=auto,2", "2 and auto are the same program on 2 ranks: both are DDP over 2"),
        (
            "layout.tensor=1,2,3",
            "3 and 1 are the same program on 2 ranks: so many ranks allow layout.tensor 1, not 3",
        ),
        ("cluster.per_node=1,2", "2 and 1 are the same program"),
        ("train.global_batch=8,16", "is other work than one with 8"),
        ("data.seq_len=32,64", "is other work than one with 32"),
    ],
)
def test_a_sweep_whose_values_cannot_be_compared_measures_nothing(folder, sweep, why, monkeypatch):
    monkeypatch.setattr("paceline.launch.bench.measure", lambda *_, **__: pytest.fail("measured"))
    done = CliRunner().invoke(command, [str(folder / "job.yaml"), "--sweep", sweep])
    assert done.exit_code == 2, done.output
    assert why in " ".join(done.output.split())


def test_a_factory_that_raises_is_told_without_a_traceback(folder):
    (folder / "own.py").write_text("def make():\n    raise ValueError('no such size')\n")
    text = JOB.replace("decoder: {layers: 2, hidden: 32, heads: 4}", "factory: 'own:make'")
    (folder / "job.yaml").write_text(text + "program: own:train\n")
    done = bench(folder, "--ranks", "1")
    assert done.returncode == 2
    assert "no such size" in done.stderr
    assert "Traceback" not in done.stderr

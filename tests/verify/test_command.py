"""`paceline verify` from the outside: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.check.verify.judge import judge
from paceline.cli import cli
from paceline.errors import PacelineError
from paceline.record.lines import read_facts
from paceline.record.verification import Facts
from paceline.report.verify_text import verdict_lines
from paceline.topology import machine as machine_module

JOB = """
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib, seq_len: 16}
train: {global_batch: 8, steps: 100}
"""
FACTORY = """
model: {factory: "mine:make"}
program: "mine:train"
data: {corpus: python-stdlib, seq_len: 16}
train: {global_batch: 8, steps: 100}
"""
TWO = ("--layout", "data=2", "--layout", "pipeline=1", "--layout", "tensor=1")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "find_gpus", lambda looks: ("", (), None))


def verify(folder: Path, text: str, *options: str) -> Result:
    job = folder / "job.yaml"
    job.write_text(text)
    return CliRunner().invoke(cli, ["verify", str(job), *options])


@pytest.mark.ranks
def test_s0_12_a_right_layout_ends_with_0_and_its_facts_can_be_judged_again(tmp_path: Path):
    facts_file = tmp_path / "facts.json"
    result = verify(tmp_path, JOB, *TWO, "--steps", "2", "--json", "--facts", str(facts_file))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["right"]
    assert (told["layout"]["data"], told["steps"]) == (2, 2)
    assert "verify: float64: DDP over 2 ranks" in result.stderr
    facts = read_facts(facts_file, Facts)
    verdict = judge(facts)
    assert [line.status for line in verdict.lines] == [line["status"] for line in told["lines"]]
    text = "\n".join(verdict_lines(verdict, facts))
    assert "PASS  every rank took part" in text
    assert "0 failed" in text.splitlines()[-1]


@pytest.mark.ranks
def test_a_layout_that_the_model_cannot_take_names_the_module(tmp_path: Path):
    options = ("--layout", "tensor=3", "--layout", "data=1", "--layout", "pipeline=1")
    result = verify(tmp_path, JOB, *options)
    assert isinstance(result.exception, PacelineError)
    assert result.exception.exit_code == 3
    assert "blocks.0.attention.query has 4 heads, tensor is 3" in str(result.exception)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("body", "code", "what"),
    [
        ("raise ValueError('no weights')", "J009", "no weights"),
        ("import torch\n    return torch.nn.Linear(8, 8)", "V003", "Linear has no nn.Embedding"),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_run_says_why(
    tmp_path: Path, body: str, code: str, what: str
):
    (tmp_path / "mine.py").write_text(f"def make():\n    {body}\n\ndef train(session):\n    pass\n")
    result = verify(tmp_path, FACTORY, *TWO)
    assert isinstance(result.exception, PacelineError)
    assert result.exception.problems[0].code == code
    assert what in result.exception.problems[0].what


def test_a_missing_package_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from paceline.job import packages as module

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    result = verify(tmp_path, JOB, *TWO)
    assert isinstance(result.exception, PacelineError)
    assert result.exception.problems[0].code == "R010"

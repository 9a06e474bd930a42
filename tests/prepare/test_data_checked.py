"""The result of `paceline data check` is known to plan and preflight, until the data change."""

import json

import pytest
from click.testing import CliRunner
from tests.prepare.conftest import write_rows
from tests.prepare.test_data_check import texts

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Status
from paceline.check.preflight.software import check_data
from paceline.cli.data import command as data
from paceline.cli.plan import command as plan
from paceline.job import load_job
from paceline.prepare.checked import find_checked
from paceline.topology.node.facts import NodeFacts

JOB = """
model: {decoder: {layers: 1, hidden: 8, heads: 1, vocab: 512}, tokenizer: bytes}
train: {global_batch: 2, steps: 3}
data: {path: a.jsonl, kind: text, seq_len: 64, held_out: 0}
cluster: {accelerator: cpu, per_node: 1}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    write_rows(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "job.yaml"


def check(*arguments: str) -> None:
    words = ["check", "--job", "job.yaml", *arguments]
    CliRunner().invoke(data, words, catch_exceptions=False, standalone_mode=False)


def planned(*arguments: str):
    result = CliRunner().invoke(plan, ["job.yaml", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_s0_17_plan_says_whether_the_data_were_checked_and_what_was_found(job, tmp_path):
    assert (
        "data        not checked; to check it: paceline data check --job job.yaml"
        in planned().stderr
    )
    check()
    assert ", 0 findings" in planned().stderr
    assert json.loads(planned("--json").stdout)["data_checked"].endswith("0 findings")
    assert "for seq_len 64 and not 32" in planned("--set", "data.seq_len=32").stderr
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"id": 1, "text": "hf_' + "b" * 34 + '"}\n')
    assert "changed since they were checked" in planned().stderr
    check()
    assert "1 finding (1 error)" in planned().stderr


def test_the_result_is_found_from_another_folder_and_after_the_job_was_moved(job, tmp_path):
    check()
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    found = find_checked(load_job(moved / "job.yaml"))
    moved.rename(tmp_path)
    assert found is not None
    assert not found.has_changed


def test_s0_17_preflight_warns_of_data_with_errors_and_of_data_that_changed(job, tmp_path):
    def results():
        need = Need(
            num_nodes=1,
            ranks_per_node=1,
            backend="gloo",
            data_checked=find_checked(load_job(job)),
        )
        facts = NodeFacts(host="a", system="Linux", kernel="6")
        return [(each.status, each.evidence) for each in check_data("a", facts, need)]

    assert results() == []
    check()
    ((status, evidence),) = results()
    assert status is Status.PASS
    assert "0 findings" in evidence
    (tmp_path / "a.jsonl").write_text('{"text": "hf_' + "b" * 34 + '"}\n')
    ((status, evidence),) = results()
    assert status is Status.WARNING
    assert "changed since" in evidence
    check()
    ((status, evidence),) = results()
    assert status is Status.WARNING
    assert "1 error" in evidence
    assert "holds a Hugging Face token" in evidence


def test_a_check_of_paths_beside_the_job_is_known_too_and_no_keep_keeps_nothing(job):
    words = ["check", "a.jsonl"]
    CliRunner().invoke(data, [*words, "--no-keep"], standalone_mode=False)
    assert find_checked(load_job(job)) is None
    CliRunner().invoke(data, words, standalone_mode=False)
    assert find_checked(load_job(job)) is not None


def test_s4_22_phase_1_has_a_gate_for_a_failed_quality_report_until_it_is_kept(job, tmp_path):
    def gates() -> list[tuple[str, str]]:
        found = json.loads(planned("--phases", "--json").stdout)["gates"]
        return [
            (gate["status"], gate["summary"])
            for gate in found
            if gate["name"] == "Data Quality Review"
        ]

    assert gates() == []
    for is_kept, status in ((False, "failed"), (True, "passed")):
        (tmp_path / "report.json").write_text(
            json.dumps({"gates": [{"name": "reviewed", "passed": is_kept}]})
        )
        check("--quality-report", "report.json")
        ((found, summary),) = gates()
        assert found == status
        assert ("reviewed is not kept" in summary) is not is_kept
    assert "0 findings" in json.loads(planned("--phases", "--only", "1").stdout)["dataQuality"]

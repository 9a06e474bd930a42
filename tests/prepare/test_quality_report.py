"""Another program's data-quality report is read, and its gates are kept (S4-22)."""

import json

import pytest
from tests.prepare.conftest import write_rows
from tests.prepare.test_data_check import checked, findings, refused, texts

from paceline.prepare.quality_report import read_quality_report

EXPECTATION = {
    "success": False,
    "expectation_config": {
        "type": "expect_column_values_to_not_be_null",
        "kwargs": {"column": "text", "batch_id": "a"},
        "severity": "critical",
    },
    "result": {"element_count": 20, "unexpected_count": 3, "unexpected_percent": 15.0},
    "exception_info": {"raised_exception": False, "exception_message": None},
}
VALIDATION = {
    "success": False,
    "results": [
        EXPECTATION,
        {
            "success": True,
            "expectation_config": {
                "expectation_type": "expect_table_row_count_to_be_between",  # before 1.0
                "kwargs": {"min_value": 1},
            },
            "result": {"observed_value": 20},
        },
    ],
    "statistics": {"evaluated_expectations": 2},
    "meta": {"great_expectations_version": "1.3.0"},
}
CHECKPOINT = {"run_results": {"ValidationResultIdentifier::a": {"validation_result": VALIDATION}}}
SODA = {"checks": [{"name": "no gaps", "outcome": "fail"}, {"name": "fresh", "outcome": "warn"}]}
PANDERA = {"DATA": {"DATAFRAME_CHECK": [{"column": "id", "check": "ge(0)", "error": "3 failed"}]}}
WHYLOGS = [["id is positive", 1, 0], {"name": "text is there", "passed": 0, "failed": 1}]
PLAIN = {
    "rows": 20,
    "gates": [
        {"name": "null ids", "value": 3, "max": 2},
        {"name": "share in English", "value": 0.97, "min": 0.9},
        {"name": "reviewed", "passed": False, "severity": "warning"},
    ],
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", texts(20))


def with_report(tmp_path, report: object, *arguments: str, code: int) -> list[tuple[str, str]]:
    (tmp_path / "report.json").write_text(json.dumps(report))
    data = checked("a.jsonl", "--quality-report", "report.json", *arguments, code=code)
    return [(severity, what) for severity, _, _, what in findings(data, "gates")]


@pytest.mark.parametrize("report", [VALIDATION, CHECKPOINT], ids=["validation", "checkpoint"])
def test_s4_22_a_failed_expectation_of_great_expectations_fails_the_check(tmp_path, report):
    name = "expect_column_values_to_not_be_null of text"
    said = f"Great Expectations: {name} is not kept (3 unexpected (15 %))"
    assert with_report(tmp_path, report, code=1) == [("error", said)]


def test_s4_22_severities_of_expectations_are_kept(tmp_path):
    config = {**EXPECTATION["expectation_config"], "severity": "warning"}
    report = {"results": [{**EXPECTATION, "expectation_config": config}]}
    ((severity, _),) = with_report(tmp_path, report, code=0)
    assert severity == "warning"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (SODA, [("error", "Soda: no gaps"), ("warning", "Soda: fresh")]),
        (PANDERA, [("error", "pandera: id: ge(0)")]),
        (WHYLOGS, [("error", "whylogs: text is there")]),
        (PLAIN, [("error", "the plain form: null ids"), ("warning", "the plain form: reviewed")]),
    ],
    ids=["soda", "pandera", "whylogs", "plain"],
)
def test_s4_22_gates_of_other_programs_are_kept(tmp_path, report, expected):
    found = with_report(tmp_path, report, code=1)
    assert [(severity, what.partition(" is not kept")[0]) for severity, what in found] == expected
    allowed = with_report(tmp_path, report, "--limit", "gates=100%", code=0)
    assert {severity for severity, _ in allowed} == {"warning"}


def test_s4_22_a_report_about_other_data_is_named(tmp_path):
    report = {"rows": 1000, "gates": [{"name": "reviewed", "passed": True}]}
    assert with_report(tmp_path, report, code=0) == [
        ("warning", "the plain form looked at 1,000 rows, and the data have 20")
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a", "JSON is malformed"),
        ('{"a": 1}', "none of the forms that are known"),
        ('{"results": []}', "holds no result"),
        ('{"results": [{"success": true}]}', "a part of it is not as its form has it"),
        ('{"gates": [{"name": "a"}]}', "neither `passed` nor a value with a limit"),
        ('{"gates": [{"name": "a", "value": 1, "maximum": 2}]}', "unknown key maximum"),
        ('{"gates": [{"name": "a", "passed": "yes"}]}', "'yes' stands where true or false"),
        ('{"gates": [{"name": "a", "passed": true, "severity": "bad"}]}', "severity bad"),
    ],
)
def test_s4_22_a_report_that_cannot_be_read_is_refused(tmp_path, text, reason):
    (tmp_path / "report.json").write_text(text)
    said = refused("a.jsonl", "--quality-report", "report.json")
    assert "D022: report.json is no data-quality report" in said
    assert reason in said


def test_s4_22_rows_are_those_that_the_expectations_counted(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(VALIDATION))
    assert read_quality_report(tmp_path / "report.json").rows == 20

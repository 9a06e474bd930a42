"""`paceline explain`: one text for every code there is."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.catalog.code import load_codes, load_guides
from paceline.catalog.failure import load_failures
from paceline.catalog.symptom import load_symptoms
from paceline.cli import cli


def run(*arguments: str):
    return CliRunner().invoke(cli, ["explain", *arguments])


def test_a_finding_is_explained_with_why_how_it_shows_fix_and_sources():
    done = run("shm-too-small")
    assert done.exit_code == 0
    parts = [line for line in done.output.splitlines() if line and not line.startswith(" ")]
    assert parts[1:4] == ["why", "how it shows", "fix"]
    assert parts[-1] == "sources"


@pytest.mark.parametrize(
    ("name", "is_about"),
    [
        ("missing-set-epoch", "set-epoch-missing: "),
        ("Missing-Set-Epoch", "set-epoch-missing: "),
        ("j003", "J003: A `--set` could not be understood"),
        ("BEN-05", "BEN-05: a line that means nothing"),
    ],
)
def test_s3_9_published_names_refusals_and_harmless_lines_are_explained_too(name, is_about):
    done = run(name)
    assert done.exit_code == 0
    assert done.output.startswith(is_about)


FIXES = re.compile(
    r"`(?:paceline|hf) |`--|\b(?:add|apply|call|choose|copy|correct|do|give|install|leave|log|look|"
    r"lower|name|plan|put|raise|read|repair|resume|run|save|set|start|take|use|verify|write)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "code", [name for name in load_codes() if re.fullmatch(r"[A-Z]\d{3}", name)]
)
def test_a_refusals_code_is_explained_by_more_than_its_title_and_has_a_fix(code):
    """63 of them repeated the error, such as J008, and 60 more named nothing to do."""
    assert FIXES.search(load_codes()[code].rest), load_codes()[code].text


def test_a_symptom_is_explained_by_its_ranked_causes_and_what_decides_between_them():
    symptom = load_symptoms()["collective-timeout"]
    done = run("collective-timeout")
    assert done.exit_code == 0
    ranked = [line for line in done.output.splitlines() if line[:1].isdigit()]
    assert [line.split()[1].rstrip(":") for line in ranked] == [each.id for each in symptom.causes]
    assert done.output.count("decided by: ") == len(symptom.causes)
    (data,) = json.loads(run("collective-timeout", "--json").output)
    assert data["code"] == "collective-timeout"
    assert data["causes"][0] == {"id": symptom.causes[0].id, "check": symptom.causes[0].check}


def test_a_name_that_is_a_failure_and_a_symptom_has_both():
    output = run("nccl-system-error").output
    assert output.count("nccl-system-error: ") >= 2
    assert "1. shm-too-small: " in output


def test_every_code_can_be_explained():
    for name in (*load_codes(), *load_failures()):
        done = run(name)
        assert done.exit_code == 0, name
        assert len(done.output) > len(name) + 20, name
        assert not re.search(r"(\.\./|docs/)[a-z/-]+\.md", done.output), name  # no wheel has pages


def test_a_guide_is_printed_by_its_name_and_hides_no_code():
    others = {*load_codes(), *load_failures(), *load_symptoms()}
    assert len(load_guides()) > 20
    assert not others & load_guides().keys()
    done = run("models")
    assert done.output.startswith("# Models")
    assert not re.search(r"\]\([a-z./-]+\.md", done.output)


def test_a_message_names_only_what_explain_knows():
    source = files("paceline")
    named = {
        name
        for path in Path(str(source)).rglob("*.py")
        for name in re.findall(r"paceline explain ([a-z][a-z-]+)`", path.read_text())
    }
    assert {"models", "places"} <= named
    assert all(run(name).exit_code == 0 for name in named)


def test_a_misspelt_code_is_answered_with_the_nearest():
    done = CliRunner().invoke(cli, ["explain", "set-epoch-mising"])
    assert done.exit_code != 0
    assert "set-epoch-missing" in str(done.exception)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("shared-memory", "is a check of `paceline preflight`"),
        ("clock", "clock-skew"),
        ("shm", "shm-too-small"),
        ("Shm Small", "shm-too-small"),
    ],
)
def test_words_of_a_title_and_checks_of_preflight_lead_to_a_code(name, near):
    assert near in str(run(name).exception)


@pytest.mark.parametrize("name", ["", "a\nb", "../../etc/passwd", "\N{SNOWMAN}"])
def test_what_is_no_name_at_all_is_refused_in_quotes(name):
    assert f"no code is called {name!r}" in str(run(name).exception)


def test_the_list_has_every_code_once():
    listed = [row["code"] for row in json.loads(run("--list", "--json").output)]
    assert len(listed) == len(set(listed))
    assert {*load_codes(), *load_failures()} <= set(listed)


def test_json_has_the_whole_text():
    (entry,) = json.loads(run("cuda-oom", "--json").output)
    assert entry["code"] == "cuda-oom"
    assert entry["why"]
    assert entry["sources"]


def test_codes_beside_the_list_are_refused():
    assert run("cuda-oom", "--list").exit_code == 2


def test_a_table_stands_in_columns():
    lines = run("anti-patterns").output.splitlines()
    head = next(line for line in lines if line.startswith("habit  "))
    row = next(line for line in lines if line.startswith("DDP for a model"))
    assert row.index("out of memory") == head.index("what happens")
    assert not any("|" in line for line in lines)


TOPICS = [name for name, code in load_codes().items() if code.about == "how to choose"]


def test_s3_10_golden_rules_comparisons_and_patterns_are_topics_in_text_and_json():
    assert {"golden-rules", "memory-by-size", "fsdp-or-deepspeed", "anti-patterns"} <= set(TOPICS)
    assert run("golden-rules").output.startswith("golden-rules: Six rules, and where each ends")
    for entry in json.loads(run(*TOPICS, "--json").output):
        assert len(entry["text"]) > 300
    assert "did you mean golden-rules" in str(run("golden-rule").exception)


@pytest.mark.parametrize(
    ("word", "first"), [("memory", "memory-by-size: "), ("patterns", "patterns: Four ways")]
)
def test_s3_10_the_words_of_the_documents_find_their_topics(word, first):
    assert run(word).output.startswith(first)

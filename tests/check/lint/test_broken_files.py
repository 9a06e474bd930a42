"""Broken files end in a finding, a word that they cannot be read, or nothing: never in an error."""

import random
import re

import pytest
from tests.check.lint.marked_cases import CASES

from paceline.check.lint.context import Context
from paceline.check.lint.fix import fix_files
from paceline.check.lint.lint import lint_files
from paceline.check.lint.sarif import sarif

TOKENS = ["null", "{}", "[]", "-1", "1e400", "$A", "${A[@]}", "*a", "&a", "---", "'", '"', "\\"]
TOKENS += ["(", "{", "0", "9" * 30, "~", "\t", "#", "\u200b", "é", "$(", "`", "<<EOF", "sh -c"]
FILES = sorted(path for path in CASES.rglob("*") if path.is_file())


def broken(text, generator):
    for _ in range(generator.randint(1, 4)):
        kind, place = generator.random(), generator.randint(0, len(text))
        words = list(re.finditer(r"[\w.\"']+", text))
        if kind < 0.25:
            text = text[:place]
        elif kind < 0.5 or not words:
            text = text[:place] + generator.choice(TOKENS) + text[place:]
        else:
            word = generator.choice(words)
            text = text[: word.start()] + generator.choice(TOKENS) + text[word.end() :]
    return text


@pytest.mark.parametrize("seed", range(8))
def test_texts_broken_at_random_are_read_or_named(seed):
    generator = random.Random(seed)
    context = Context(gpu="V100", nodes=2, gpus_per_node=8)
    for path in FILES:
        text = broken(path.read_text(), generator)
        linted = lint_files({path.name: text.encode()}, context)
        for fixed in fix_files(linted.findings, {path.name: text}):
            assert fixed.after != fixed.before
        assert sarif(linted.findings, linted.answered, linted.unread)["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.yaml", "name: a\nmodel: {preset: [\ncluster: {nodes: 2}\n"),
        ("pod.yaml", "apiVersion: v1\nkind: Pod\nspec: {containers: [\n"),
        ("plan.json", '{"cluster": {}, "layout": {}, "decisions": [], "rejected": [,]}'),
    ],
)
def test_s3_12_a_job_a_plan_or_a_manifest_that_cannot_be_parsed_is_named(name, text):
    linted = lint_files({name: text.encode(), "other.yaml": b"a: [\n"}, Context())
    assert [one.path for one in linted.unread] == [name]


def test_a_shell_that_starts_itself_ends():
    text = 'CMD=\'bash -c "$CMD"\'\nbash -c "$CMD"\n' * 3
    assert lint_files({"a.sh": text.encode()}, Context()).kinds == {"a.sh": "shell"}


@pytest.mark.parametrize("first_line", ["distributed_type: FSDP\n", "anything: else\n"])
def test_yaml_aliases_that_multiply_end_and_are_named(first_line):
    text = first_line + "a: &a [x,x,x,x,x,x,x,x,x]\n"
    text += "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
    )
    linted = lint_files({"bomb.yaml": text.encode()}, Context())
    assert [one.path for one in linted.unread] == ["bomb.yaml"]
    assert "aliases" in linted.unread[0].what


@pytest.mark.parametrize(
    "text",
    [
        "export A=x\n" + 'export A="$A $A"\n' * 60 + "torchrun $A train.py\n",
        "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + 'torchrun "${A[@]}" train.py\n',
    ],
)
def test_a_variable_that_doubles_itself_ends(text):
    assert lint_files({"a.sh": text.encode()}, Context()).kinds == {"a.sh": "shell"}


def test_a_broken_file_of_tests_is_no_trouble_of_its_repository():
    broken = b'{"train_batch_size": 8,\n "train_micro_batch_size_per_gpu": }'
    files = dict.fromkeys(("repo/ds.json", "repo/tests/ds.json"), broken)
    assert [one.path for one in lint_files(files, Context()).unread] == ["repo/ds.json"]
    alone = {"repo/tests/ds.json": broken}
    assert [one.path for one in lint_files(alone, Context()).unread] == [*alone]

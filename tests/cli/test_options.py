"""Numbers that no verb reckons with, and options that it lacks."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from tests.plan.scene import JOB

from paceline.cli import cli
from paceline.cli.options import FiniteRange, pointed_elsewhere


def options(group: click.Command, *path: str) -> Iterator[tuple[str, click.Parameter]]:
    """Every parameter of every verb, with the verb's words."""
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from options(command, *path, name)
        return
    for parameter in group.params:
        yield " ".join(path), parameter


def test_every_range_of_real_numbers_leaves_nan_out():
    ranges = [each for each in options(cli) if isinstance(each[1].type, click.FloatRange)]
    assert len(ranges) >= 7
    taking = [
        f"{verb} {each.opts[0]}" for verb, each in ranges if type(each.type) is not FiniteRange
    ]
    assert taking == []


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("verb", ["bench", "verify", "drill"])
def test_a_timeout_that_never_comes_is_refused(verb, value):
    done = CliRunner().invoke(cli, [verb, "job.yaml", "--timeout", value])
    assert done.exit_code == 2
    assert "--timeout" in done.output
    assert "not a number to reckon with" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--deadline", "soon"],
        ["plan", "--budget", "little"],
        ["plan", "--deadline", "1ms", "--fail-on", "deadline"],
        ["prove", "--layout", "micro_batch=none"],
        ["simulate", "--accelerator", "H9000"],
    ],
)
def test_a_message_names_the_option_that_gave_the_value_and_not_set(tmp_path, words):
    (tmp_path / "job.yaml").write_text(JOB)
    done = CliRunner().invoke(cli, [words[0], str(tmp_path / "job.yaml"), *words[1:]])
    (problem,) = done.exception.problems
    assert problem.where.endswith(f", {words[1]}")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("cost --spot", "'--spot': spot prices are always listed where they are known"),
        ("plan job.yaml --micro-batch 4", "'--micro-batch': use --set layout.micro_batch=VALUE"),
        ("plan job.yaml --layout tensor=2", "'--layout': use --set layout.KEY=VALUE"),
        (
            "plan job.yaml --verbose",
            "'--verbose': --explain shows what each number is made of",
        ),
        ("plan job.yaml --explan", "'--explan'. Did you mean '--explain'?"),
    ],
)
def test_an_option_that_a_verb_lacks_is_answered_with_what_does_it(words, hint):
    with pytest.raises(click.NoSuchOption) as refused:
        cli.main(words.split(), standalone_mode=False)
    assert pointed_elsewhere(refused.value).format_message() == f"No such option {hint}"

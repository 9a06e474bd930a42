"""Each command that a page shows is one that `paceline` takes: its verb and options."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest

from paceline.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"^ *(?:\$ )?(paceline .*)$|`(paceline [^`\n]+)`", re.MULTILINE)


def commands_of(text: str) -> Iterator[list[str]]:
    text = re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL).replace("\\\n", " ")
    for fenced, inline in SHOWN.findall(text):
        words = shlex.shlex(fenced or inline, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        yield list(takewhile(lambda word: not set(word) <= set("();<>|&"), words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_can_be_typed(page: Path):
    wrong = {}
    for command in commands_of(page.read_text()):
        try:
            parse(command[1:])
        except click.ClickException as error:
            wrong[shlex.join(command)] = error.format_message()
    assert wrong == {}


def parse(words: list[str]) -> None:
    """As click does it, without doing anything.

    Raises:
        click.ClickException: A verb, an option or a value that there is not.
    """
    command, context = cli, click.Context(cli)
    while isinstance(command, click.Group) and words and re.match("[a-z]", words[0]):
        name, inner, words = command.resolve_command(context, words)
        command, context = inner, click.Context(inner, info_name=name, parent=context)
    own = words[: words.index("--")] if "--" in words else words
    given = {word.split("=")[0] for word in own if word.startswith("--")}
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    unknown = given - known - {"--help"}
    if unknown:
        raise click.NoSuchOption(min(unknown), ctx=context)


def test_a_misspelt_option_is_found():
    with pytest.raises(click.NoSuchOption):
        parse(["run", "job.yaml", "--resum", "RUN"])
    with pytest.raises(click.ClickException):
        parse(["trian", "job.yaml"])

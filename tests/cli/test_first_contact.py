"""What a person types who does not know Paceline yet, and what the first screens answer."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.cli import COMMANDS, cli
from paceline.cli.verbs import _TRIED, GROUPS, START


def shown(*words: str) -> str:
    result = CliRunner().invoke(cli, words, prog_name="paceline")
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    result = CliRunner().invoke(cli, words, prog_name="paceline")
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("trian", "run JOB"),
        ("train", "run JOB"),
        ("pln", "plan"),
        ("resume", "run --resume RUN"),
        ("ls", "runs"),
        ("Daignose", "diagnose"),
        ("version", "--version"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_the_command_it_stands_for(typed, command):
    assert f"There is no command `{typed}`: did you mean `paceline {command}`?" in refused(typed)


def test_a_word_that_stands_for_nothing_is_answered_without_a_guess():
    assert "There is no command `xyzzy`\n" in refused("xyzzy")


def test_every_command_that_a_tried_word_leads_to_exists():
    for typed, command in _TRIED.items():
        assert typed not in COMMANDS
        plain = [word for word in command.split() if not word.isupper()]
        words = [word for word in plain if not word.startswith("--")]
        text = shown(*words, "--help")
        assert all(option in text for option in plain if option.startswith("--"))


def test_paceline_alone_shows_five_things_that_people_do_and_where_all_commands_are():
    assert shown() == f"{START}\n"
    entries = re.findall(r"^  (\S.*?)  +(paceline .*)$", START, re.M)
    assert len(entries) == 5
    verbs = {verb for _, commands in entries for verb in re.findall(r"paceline (\w+)", commands)}
    assert verbs <= COMMANDS.keys()
    assert "paceline --help: all commands" in START


def test_help_of_a_verb_can_be_asked_for_in_both_orders():
    assert shown("help", "checkpoint", "ls") == shown("checkpoint", "ls", "--help")
    assert shown("help") == shown("--help")
    assert "There is no command `nonsuch`" in refused("help", "nonsuch")


def test_the_help_lists_every_verb_under_what_one_wants_to_do_before_the_options():
    text = shown("--help")
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert places[-1] < text.index("\nOptions:\n")
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.M)


def commands(command: click.Command = cli, *words: str):
    """Every command that has a help, with the words that call it."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), *words, name)


ALL = {" ".join(words): command for words, command in commands()}


@pytest.mark.parametrize("words", ALL)
def test_every_help_fits_80_columns(words):
    wide = [line for line in shown(*words.split(), "--help").splitlines() if len(line) > 80]
    assert wide == []


@pytest.mark.parametrize(
    "words", [""] + [name for name in ALL if isinstance(ALL[name], click.Group)]
)
def test_no_line_of_a_list_of_commands_is_cut(words):
    """`data check` was `schema, nulls, duplicates, lengths, classes,...`; eight more were cut."""
    _, _, listed = shown(*words.split(), "--help").partition("Commands:\n")
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize("words", ALL)
def test_every_help_begins_with_an_imperative_sentence_and_has_an_example(words):
    text = shown(*words.split(), "--help")
    verb = text.split("\n\n")[1].split()[0]
    assert verb in IMPERATIVES or not words
    assert "Examples:" in text


IMPERATIVES = {line.split()[0] for line in COMMANDS.values()} | {
    "Scale",
    "Split",
    "List",
    "Send",
    "Tokenize",
}
"""Verbs in the infinitive: of the lines of `paceline --help`, and of parts of those commands."""


def test_the_version_names_python_torch_and_engines_without_importing_any():
    code = (
        "import sys; from paceline.cli import cli; cli(['--version'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'accelerate', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["paceline", "python", "torch", "engines"]
    assert imported == "[]"
    found = json.loads(shown("--version", "--json"))
    assert found["python"].split(".") == [str(part) for part in sys.version_info[:3]]
    if found["torch"] is not None:
        import torch

        assert found["torch"]["version"] == str(torch.__version__)
        assert found["torch"]["cuda"] == torch.version.cuda
    import importlib.metadata

    for name, version in found["engines"].items():
        assert importlib.metadata.version(name) == version
    assert shown("-V") == shown("--version")


def test_json_without_a_command_is_refused():
    assert "--json goes with --version" in refused("--json")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_without_importing_them(shell):
    line = "paceline che"
    environment = {
        **os.environ,
        "_PACELINE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line if shell != "fish" else "paceline",
        "COMP_CWORD": "1" if shell != "fish" else "che",
    }
    code = (
        "import atexit, sys; "
        "atexit.register(lambda: print('paceline.cli.checkpoint' in sys.modules)); "
        "sys.argv[0] = 'paceline'; from paceline.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "checkpoint" in done.stdout
    assert "runs" not in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_line_that_the_help_gives_makes_a_shells_completion(shell):
    assert f"_PACELINE_COMPLETE={shell}_source paceline" in shown("--help")
    environment = {**os.environ, "_PACELINE_COMPLETE": f"{shell}_source"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("paceline"))],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert f"_PACELINE_COMPLETE={shell}_complete" in done.stdout


REFERENCE = Path(__file__).parents[2] / "docs/reference"


def test_the_man_page_shows_every_help_without_a_warning():
    page = (REFERENCE / "paceline.1").read_text()
    for words in filter(None, ALL):
        assert f'\n.SH "{words.upper()}"\n' in page
    if shutil.which("groff") is None:
        pytest.skip("NOT TESTED: groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-c", "-P-b", "-P-u", str(REFERENCE / "paceline.1")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = [line.strip() for line in shown("run", "--help").splitlines() if line.strip()]
    # click keeps a command's `-h, --help` as whoever invoked it first in this process had it.
    told = [line for line in lines if not line.endswith("Show this message and exit.")]
    assert [line for line in told if line not in done.stdout] == []

"""`paceline contract`: do what a skill's JSON contract asks."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click

from paceline.contracts.skills import SKILLS, find_skill, run_skill
from paceline.contracts.skills.messages.read import schema_of
from paceline.errors import JobError, RunError


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--schema",
    type=click.Choice(["request", "answer"]),
    help="Print the JSON Schema of what goes in or comes out, and do nothing.",
)
def command(name: str, schema: Literal["request", "answer"] | None) -> None:
    """Answer a JSON request on standard input: do the work, print the answer as JSON.

    NAME is a contract, or `list`. Paths in the request start from the current folder. What the work
    prints goes to standard error. A request that is wrong ends with exit code 2 and starts nothing;
    work that fails ends with 4. The answer then has the status `error` and the reason; of a
    Kubeflow request without a known action there is none.

    \b
    Examples:
      paceline contract list
      paceline contract pytorch-trainer < request.json > answer.json
      paceline contract pytorch-trainer --schema request
    """
    if name == "list":
        _list()
        return
    skill = find_skill(name)
    if schema is not None:
        kind = skill.request if schema == "request" else skill.answer
        click.echo(json.dumps(schema_of(kind), indent=2))
        return
    text = None
    try:
        text = _read()
        with _talk_on_stderr():
            answer = run_skill(name, text, source="standard input", folder=Path.cwd())
    except JobError as error:
        if refusal := skill.refusal(str(error), text):
            click.echo(json.dumps(refusal, indent=2))
        raise
    click.echo(json.dumps(answer, indent=2))
    if answer["status"] == "error":
        sys.exit(RunError.exit_code)


def _list() -> None:
    from paceline.report.table import format_table

    rows = [(name, skill.title, skill.needs) for name, skill in SKILLS.items()]
    click.echo(format_table([("contract", "what", "needs"), *rows]))


def _read() -> str:
    """Standard input, which must not be a person who does not know that it is waited for."""
    if sys.stdin is None or sys.stdin.isatty():  # None: `<&-`
        raise click.UsageError("Give the request on standard input: < request.json")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        what = "the request is not UTF-8 text"
        fix = "write it as UTF-8"
        raise JobError.of(code="H030", what=what, where="standard input", fix=fix) from None


@contextlib.contextmanager
def _talk_on_stderr() -> Iterator[None]:
    """What is printed, by libraries and their processes too, goes to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

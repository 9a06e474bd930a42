"""`paceline explain`: what a code means, how it shows, and what to change."""

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option
from paceline.cli.table import format_table
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.catalog.code import Code
    from paceline.catalog.failure import BenignLine, Failure
    from paceline.catalog.symptom import Symptom

_WIDTH = 96
_MOST_NEAR = 3
"""Codes that are named where none is called so."""


@click.command()
@click.argument("names", nargs=-1, metavar="[CODE]...")
@click.option("--list", "list_all", is_flag=True, help="List every code with its title.")
@json_option
def command(names: tuple[str, ...], list_all: bool, as_json: bool) -> None:
    """Say why something is wrong, how it shows, the fix, and where that is known from.

    CODE is the id of a finding of `lint`, `diagnose` or `preflight` (set-epoch-missing), a
    published name (missing-set-epoch), a symptom with its likely causes (collective-timeout), a
    harmless line (BEN-05), or a refusal's code (J003).

    \b
    Examples:
      paceline explain set-epoch-missing
      paceline explain J003 L014
      paceline explain --list
      paceline explain cuda-oom --json
    """
    if list_all or not names:
        if names:
            raise click.UsageError("give codes, or --list")
        _list(as_json)
        return
    found = [entry for name in names for entry in _find(name)]
    if as_json:
        click.echo(json.dumps([_data(entry) for entry in found], indent=2))
        return
    click.echo("\n\n".join("\n".join(_lines(entry)) for entry in found))


def _find(name: str) -> "tuple[Code | Failure | BenignLine | Symptom, ...]":
    from paceline.catalog.code import load_codes
    from paceline.catalog.failure import failures_named, load_benign_lines
    from paceline.catalog.symptom import load_symptoms
    from paceline.check.preflight.preflight import check_names

    code = load_codes().get(name.upper())
    if code is not None:
        return (code,)
    harmless = tuple(line for line in load_benign_lines() if line.id == name.upper())
    found = harmless or failures_named(name)
    shown = load_symptoms().get(name.lower())
    if found or shown:
        return (*found, *([shown] if shown else []))
    near = _near(name)
    what = f"no code is called {name!r}"
    if name in check_names():
        what = (
            f"{name} is a check of `paceline preflight`; the code of what it found is in brackets"
        )
    raise JobError.of(
        code="T020",
        what=what,
        where="CODE",
        fix=f"did you mean {' or '.join(near)}?" if near else "`paceline explain --list` has all",
    )


def _near(name: str) -> list[str]:
    """Codes that are written alike, and those whose name or title has all of its words."""
    titles = _titles()
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    named = [
        code
        for code, title in titles.items()
        if words and all(word in f"{code} {title}".lower() for word in words)
    ]
    close = difflib.get_close_matches(name, titles, n=_MOST_NEAR)
    return list(dict.fromkeys([*named, *close]))[:_MOST_NEAR]


def _titles() -> Mapping[str, str]:
    from paceline.catalog.code import load_codes
    from paceline.catalog.failure import load_benign_lines, load_failures
    from paceline.catalog.symptom import load_symptoms

    titles = {failure.id: failure.title for failure in load_failures().values()}
    for failure in load_failures().values():
        for name in failure.published:
            titles.setdefault(name, f"{failure.title} ({failure.id})")
    for symptom in load_symptoms().values():
        titles.setdefault(symptom.id, f"symptom: {symptom.title}")
    titles |= {line.id: f"harmless: {line.why}" for line in load_benign_lines()}
    return titles | {code.code: _first_sentence(code.text) for code in load_codes().values()}


def _list(as_json: bool) -> None:
    titles = _titles()
    if as_json:
        rows = [{"code": code, "title": title} for code, title in titles.items()]
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(format_table([("code", "title"), *titles.items()]))


def _data(entry: "Code | Failure | BenignLine | Symptom") -> dict[str, Any]:
    """What is known of it, under the name `code` whichever it is."""
    from paceline.catalog.code import Code
    from paceline.catalog.symptom import Symptom

    if isinstance(entry, Symptom):
        causes = [{"id": each.id, "check": each.check} for each in entry.causes]
        return {
            "code": entry.id,
            "title": entry.title,
            "of": sorted(entry.of),
            "causes": causes,
            "sources": entry.sources,
        }
    found = asdict(entry)
    return found if isinstance(entry, Code) else {"code": found.pop("id")} | found


def _lines(entry: "Code | Failure | BenignLine | Symptom") -> Iterator[str]:
    from paceline.catalog.code import Code
    from paceline.catalog.failure import BenignLine
    from paceline.catalog.symptom import Symptom

    if isinstance(entry, Code):
        yield f"{entry.code}: {entry.about}"
        yield from _plain(entry.text)
    elif isinstance(entry, BenignLine):
        yield f"{entry.id}: a line that means nothing"
        yield from _part("how it shows", entry.shows)
        yield from _part("why", entry.why)
        yield from _part("when it matters after all", entry.matters_when)
    elif isinstance(entry, Symptom):
        yield from _symptom_lines(entry)
    else:
        yield from _failure_lines(entry)


def _symptom_lines(symptom: "Symptom") -> Iterator[str]:
    """Its causes as ranked, each with what decides; `diagnose` puts what a log speaks for first."""
    from paceline.catalog.failure import load_failures

    yield f"{symptom.id}: {symptom.title}"
    yield "  a symptom; it may have several causes"
    yield from _part("what says no more than this", ", ".join(sorted(symptom.of)))
    for place, cause in enumerate(symptom.causes, start=1):
        told = " (where the log speaks for it)" if cause.only else ""
        yield ""
        yield f"{place}. {cause.id}: {load_failures()[cause.id].title}{told}"
        yield from _fill(f"decided by: {cause.check}", indent="  ")
    yield from _part("sources", ", ".join(symptom.sources))


def _failure_lines(failure: "Failure") -> Iterator[str]:
    yield f"{failure.id}: {failure.title}"
    known_as = [f"published as {', '.join(failure.published)}"] if failure.published else []
    yield "  " + "; ".join([failure.effect, ", ".join(failure.frameworks) or "any", *known_as])
    yield from _part("why", failure.why)
    yield from _part("how it shows", failure.shows)
    yield from _part("fix", failure.fix)
    yield from _part("not to be confused with", failure.not_to_confuse)
    yield from _part("seen before the run", failure.before)
    yield from _part("seen while it runs", failure.during)
    yield from _part("sources", ", ".join(failure.sources))


def _part(name: str, text: str | tuple[str, ...] | None) -> Iterator[str]:
    if not text:
        return
    yield ""
    yield name
    if isinstance(text, str):
        yield from _fill(text, indent="  ")
        return
    for line in text:  # of a log: they keep their length, a wrapped one could not be searched for
        yield from (f"  {part}" for part in line.splitlines())


def _fill(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _plain(markdown: str) -> Iterator[str]:
    """Paragraphs of a page without the marks of links."""
    for paragraph in re.sub(r"\[([^]]+)\]\((?:\.\./)*([^)]+)\)", r"\1 (docs/\2)", markdown).split(
        "\n\n"
    ):
        yield ""
        if paragraph.startswith(("|", "```", "- ", "    ")):
            yield paragraph
        else:
            yield from _fill(paragraph)


def _first_sentence(text: str) -> str:
    plain = " ".join(text.split("\n\n")[0].split())
    return textwrap.shorten(plain.split(". ")[0].removesuffix("."), 90, placeholder=" ...")

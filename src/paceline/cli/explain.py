"""`paceline explain`: what a code means, how it shows, and what to change."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from paceline.catalog.code import load_guides
from paceline.cli.options import json_option
from paceline.cli.screen import show
from paceline.report.table import format_table, text_width, wrapped

if TYPE_CHECKING:
    from paceline.catalog.failure import Failure
    from paceline.catalog.symptom import Symptom
    from paceline.check.explain import Entry


@click.command()
@click.argument("names", nargs=-1, metavar="[CODE]...")
@click.option("--list", "list_all", is_flag=True, help="List every code with its title.")
@json_option
def command(names: tuple[str, ...], list_all: bool, as_json: bool) -> None:
    """Explain a code: why it happens, how it shows, the fix, and the sources.

    CODE is the id of a finding of `lint`, `diagnose` or `preflight` (set-epoch-missing), a
    published name (missing-set-epoch), a symptom with its likely causes (collective-timeout), a
    harmless line (BEN-05), a refusal's code (J003), or a topic to choose by (golden-rules,
    memory-by-size, ddp-or-fsdp, fsdp-or-deepspeed, anti-patterns), or a guide (models, planning).

    \b
    Examples:
      paceline explain set-epoch-missing
      paceline explain J003 L014
      paceline explain golden-rules memory-by-size
      paceline explain --list
      paceline explain cuda-oom --json
    """
    from paceline.check.explain import entry_data, explain

    if list_all or not names:
        if names:
            raise click.UsageError("give codes, or --list")
        _list(as_json)
        return
    found = [entry for name in names for entry in explain(name)]
    if as_json:
        click.echo(json.dumps([entry_data(entry) for entry in found], indent=2))
        return
    show("\n\n".join("\n".join(_lines(entry)) for entry in found))


def _list(as_json: bool) -> None:
    from paceline.check.explain import titles

    known = titles()
    if as_json:
        rows = [{"code": code, "title": title} for code, title in known.items()]
        click.echo(json.dumps(rows, indent=2))
        return
    show(format_table([("code", "title"), *known.items()]))


def _lines(entry: "Entry") -> Iterator[str]:
    from paceline.catalog.code import GUIDE, Code
    from paceline.catalog.failure import BenignLine
    from paceline.catalog.symptom import Symptom

    if isinstance(entry, Code) and entry.about == GUIDE:
        yield from _with_guides(entry.text).splitlines()
    elif isinstance(entry, Code):
        yield from _fill(f"{entry.code}: {entry.title}", indent="")
        yield from _plain(entry.rest) if entry.rest else ()
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
    yield from _part("what shows no more than this", ", ".join(sorted(symptom.of)))
    for place, cause in enumerate(symptom.causes, start=1):
        told = " (where the log speaks for it)" if cause.only else ""
        yield ""
        yield f"{place}. {cause.id}: {load_failures()[cause.id].title}{told}"
        yield from _fill(f"decided by: {cause.check}", indent="  ")
    yield from _part("sources", ", ".join(symptom.sources))


def _failure_lines(failure: "Failure") -> Iterator[str]:
    yield f"{failure.id}: {failure.title}"
    known_as = [f"published as: {', '.join(failure.published)}"] if failure.published else []
    frameworks = f"frameworks: {', '.join(failure.frameworks) or 'any'}"
    yield "  " + "; ".join([f"effect: {failure.effect}", frameworks, *known_as])
    yield from _part("why", failure.why)
    yield from _part("how it shows", failure.shows)
    yield from _part("fix", failure.fix)
    yield from _part("not to be confused with", failure.not_to_confuse)
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
        _with_guides(text),
        text_width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _with_guides(text: str) -> str:
    """Guides by the command that prints them: an installed Paceline has no folder of pages.

    >>> _with_guides("see docs/guides/data.md#classes")
    'see `paceline explain data`'
    >>> _with_guides("[plans](planning.md) and [time](../concepts/estimates.md)")
    'plans (`paceline explain planning`) and time (page concepts/estimates of the documentation)'
    """
    text = re.sub(r"\[([^]]+)\]\(([^)]+\.md(?:#[\w-]+)?)\)", r"\1 (\2)", text)
    text = re.sub(r"(?<![\w/.-])([a-z-]+\.md)", r"docs/guides/\1", text)  # of one guide in another
    return re.sub(
        r"(?<![\w/])(?:\.\./|docs/)+((?:[a-z]+/)*)([a-z-]+)\.md(?:#[\w-]+)?", _of_page, text
    )


def _of_page(found: re.Match[str]) -> str:
    folder, name = found.groups()
    if name in load_guides():
        return f"`paceline explain {name}`"
    return f"page {folder}{name} of the documentation"


def _plain(markdown: str) -> Iterator[str]:
    """Paragraphs of a page without the marks of links."""
    for paragraph in re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (\2)", markdown).split("\n\n"):
        yield ""
        if paragraph.startswith("|"):
            yield from _table(paragraph)
        elif paragraph.startswith(("```", "    ")):
            yield paragraph
        elif paragraph.startswith(("- ", "1. ")):
            for item in re.split(r"\n(?=- |\d+\. )", paragraph):
                mark, _, text = item.partition(" ")
                yield from wrapped(f"{mark} ", _with_guides(" ".join(text.split())))
        else:
            yield from _fill(paragraph)


def _table(markdown: str) -> Iterator[str]:
    """A table of a page, in columns."""
    lines = [line for line in markdown.splitlines() if not line.startswith("| ---")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    yield format_table([head, *rows], keep=len(head))

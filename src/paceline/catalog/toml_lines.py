"""The line of each table and key of a TOML file, for messages: `tomllib` does not keep it."""

import re
from collections.abc import Iterable
from dataclasses import replace

from paceline.errors import Problem

_HEAD = re.compile(r"\s*(\[\[?)([^\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def with_lines(problems: Iterable[Problem], text: str, file: str) -> tuple[Problem, ...]:
    """The problems of a file with the line that each is in, where one is found."""
    lines, ending = lines_of(text), f" in {file}"
    return tuple(
        replace(each, where=f"{each.where} line {number}")
        if each.where.endswith(ending) and (number := _nearest(each.where, ending, lines))
        else each
        for each in problems
    )


def _nearest(where: str, ending: str, lines: dict[str, int]) -> int | None:
    """The line of a place, or of the table around it."""
    place = where.removesuffix(ending)
    while place not in lines and "." in place:
        place = place.rpartition(".")[0]
    return lines.get(place)


def lines_of(text: str) -> dict[str, int]:
    """Place of each table and key, as messages name it, -> its line. The n-th `[[prices]]` is
    `prices n`.

    >>> lines_of('[links.fast]\\nkind = "x"\\n[[prices]]\\nprovider = "us"\\n')
    {'links.fast': 1, 'links.fast.kind': 2, 'prices 1': 3, 'prices 1.provider': 4}
    """
    found: dict[str, int] = {}
    table, num_rows = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if head := _HEAD.match(line):
            table = _bare(head[2])
            if head[1] == "[[":
                num_rows += 1
                table = f"{table} {num_rows}"
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            name = _bare(key[1])
            found.setdefault(f"{table}.{name}" if table else name, number)
    return found


def _bare(dotted: str) -> str:
    """A dotted name without quotes and the blanks around its dots."""
    return re.sub(r"\s*\.\s*", ".", dotted.strip()).replace('"', "").replace("'", "")

"""Plain tables and labelled paragraphs for people, as wide as their terminal."""

import re
import sys
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import chain

COLUMNS: ContextVar[int] = ContextVar("columns", default=80)
"""Characters of a line. The command sets it to the terminal's, and to `UNBOUNDED` for a pipe or a
file, whose reader searches for lines and wants them whole."""

UNBOUNDED = sys.maxsize

_WIDEST_TEXT = 100
"""Characters of a line of a paragraph, however wide the terminal is: longer lines read badly."""


def text_width() -> int:
    """Characters of a line of a paragraph."""
    columns = COLUMNS.get()
    return columns if columns == UNBOUNDED else min(columns, _WIDEST_TEXT)


def format_table(rows: Sequence[Sequence[str]], *, keep: int | None = None) -> str:
    """Columns as wide as their widest cell, two spaces apart; the first row is the head.

    A table that is wider than the terminal loses columns from its end and names them below; what
    is too wide still has its widest cells wrapped between words: a name stays whole.

    Args:
        rows: Cells of each row.
        keep: Columns from the start that are never left out; all of them when left out.

    >>> print(format_table([("NAME", "N"), ("a", "10")]))
    NAME  N
    a     10
    """
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    count = len(widths)
    while keep is not None and count > keep and _total(widths[:count]) > COLUMNS.get():
        count -= 1
    hidden, widths = rows[0][count:], widths[:count]
    words = [
        max(map(len, chain(*(row[i].split() for row in rows))), default=0) for i in range(count)
    ]
    least = [min(width, max(word, _LEAST_CELL)) for width, word in zip(widths, words, strict=True)]
    while _total(widths) > COLUMNS.get() and widths != least:
        _, widest = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths[widest] -= 1
    lines = [line for row in rows for line in _row_lines(row[:count], widths)]
    if hidden:
        lines.append(not_shown(hidden))
    return "\n".join(lines)


def not_shown(hidden: Sequence[str]) -> str:
    """The line below a table that is too wide for its terminal."""
    return f"{COLUMNS.get()} columns have no room for (see --json): {', '.join(hidden)}"


_LEAST_CELL = 10
"""Characters that a wrapped cell keeps, so that its words stay readable."""


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _row_lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [
        [cell] if len(cell) <= width else _wrap(cell, width)
        for cell, width in zip(row, widths, strict=True)
    ]
    return [
        "  ".join(
            (cell[line] if line < len(cell) else "").ljust(width)
            for cell, width in zip(cells, widths, strict=True)
        ).rstrip()
        for line in range(max(map(len, cells)))
    ]


def _wrap(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in Markdown, the first the heading.

    >>> print(markdown_table([("name", "n"), ("a|b", "10")]))
    | name | n |
    | --- | --- |
    | a\\|b | 10 |
    """
    lines = ["| " + " | ".join(each.replace("|", "\\|") for each in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def wrapped(head: str, text: str, *, indent: int | None = None) -> list[str]:
    """The lines of a text after its label.

    Args:
        head: What the first line begins with.
        text: In one line.
        indent: Spaces before the other lines; as long as the label when left out.
    """
    later = len(head) if indent is None else indent
    return filled(text, text_width(), first=head, later=" " * later) or [head.rstrip()]


def filled(text: str, width: int, *, later: str, first: str = "") -> list[str]:
    """The lines of a text, broken between words, and in no `command` that fits into a line.

    >>> filled("or write one with `paceline catalog`", 20, later="  ")
    ['or write one with', '  `paceline catalog`']
    """

    def whole(code: re.Match[str]) -> str:
        fits = len(code[0]) <= width - len(later)
        return code[0].replace(" ", "\0") if fits else code[0]

    lines = textwrap.wrap(
        _CODE.sub(whole, text),
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


_CODE = re.compile(r"`[^`]+`")

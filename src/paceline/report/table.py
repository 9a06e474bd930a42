"""Plain tables and labelled paragraphs for people."""

import textwrap
from collections.abc import Sequence

WIDTH = 96
"""Characters of a line of a paragraph."""


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; the first row is the head.

    >>> print(format_table([("NAME", "N"), ("a", "10")]))
    NAME  N
    a     10
    """
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


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


def wrapped(head: str, text: str, *, width: int = WIDTH, indent: int | None = None) -> list[str]:
    """The lines of a text after its label.

    Args:
        head: What the first line begins with.
        text: In one line.
        width: Of the longest line.
        indent: Spaces before the other lines; as long as the label when left out.
    """
    later = len(head) if indent is None else indent
    lines = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * later)
    return lines or [head.rstrip()]

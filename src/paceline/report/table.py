"""Plain tables for people."""

from collections.abc import Sequence


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

"""The Python of a notebook, with the place of each of its lines."""

import ast
import json
import re
import warnings
from collections.abc import Iterator

from paceline.check.lint.facts.source import Unreadable

_MAGIC = re.compile(r"(\s*)(%{1,2}[A-Za-z].*|!.*|[\w.]+\?{1,2}|\?{1,2}[\w.]+)\s*")
"""IPython's own lines: `%matplotlib inline`, `!pip install`, `torch.save?`."""

_ASSIGNED = re.compile(r"(\s*[\w, ]+=\s*)[%!].*")
"""`files = !ls`."""

_OTHERS = re.compile(r"%%(bash|sh|script|html|javascript|js|latex|writefile)\b")
"""Cells in another language."""


def read_notebook(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The code of all cells in order; for each of its lines the cell and the line in it, from 1.

    IPython's magics become `pass` or `None`; cells in other languages are left out.

    Raises:
        Unreadable: It is no notebook.
    """
    try:
        data = json.loads(text)
        language = data.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        cells = data["cells"]
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"it is no notebook that can be read: {error!r}", None) from error
    if language != "python":
        raise Unreadable(f"a notebook in {language}, not in Python", None)
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, source in sources:
        if _OTHERS.match(source.lstrip()):
            continue
        written = source.split("\n")
        lines += written if _is_python(source) else _without_magics(written)
        places += [(number, line) for line in range(1, len(written) + 1)]
    return "\n".join(lines) + "\n", tuple(places)


def _is_python(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the cell's own escapes and literals
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_magics(lines: list[str]) -> Iterator[str]:
    """As many lines; a command for the shell that is continued takes the next ones along."""
    is_continued = False
    for line in lines:
        magic, assigned = _MAGIC.fullmatch(line), _ASSIGNED.fullmatch(line)
        if is_continued:
            yield ""
        else:
            yield f"{magic[1]}pass" if magic else f"{assigned[1]}None" if assigned else line
        is_continued = line.endswith("\\") and bool(is_continued or magic or assigned)

"""The line of a program's output that says why it failed, and a problem in a request."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import Problem

_ERROR = re.compile(r"^(\[rank\d+\]:? ?)?[A-Za-z_.]*(Error|Exception|Exit|Interrupt)\b.*")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def last_words(text: str) -> str:
    """The last line that names an exception, else the last one that says anything.

    >>> last_words("Traceback\\n  x\\nValueError: no\\nE1121 torch: failed\\n")
    'ValueError: no'
    """
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    return (exceptions_in(text) or lines or ["it said nothing"])[-1][:400]


def exceptions_in(text: str) -> list[str]:
    """The lines that name an exception, in order."""
    lines = (line.strip() for line in _COLOUR.sub("", text).splitlines())
    return [line for line in lines if _ERROR.match(line)]


def raised_in(text: str, path: str | Path) -> str:
    """A file, and the last line of it that a traceback shows; empty where it shows none.

    >>> raised_in('File "/a/t.py", line 7, in f\\nFile "/b.py", line 1', "t.py")
    't.py, line 7: '
    """
    frames = re.findall(r'File "(.+)", line (\d+)', text)
    numbers = [number for each, number in frames if Path(each).name == Path(path).name]
    return f"{path}, line {numbers[-1]}: " if numbers else ""


def check_model_file(path: Path, key: str) -> Iterator[Problem]:
    """Whether a request's file can have `build_model()`; it is read and not run, and what is no
    Python fails when it runs, with its line.

    Args:
        path: The file.
        key: The request's, which names it.
    """
    if not path.is_file():
        yield problem(key, f"there is no file {path.name}", "name the model's Python file")
        return
    if path.suffix != ".py":
        yield problem(key, f"{path.name} is no Python file", "name a .py with build_model()")
        return
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return
    named = {getattr(node, "name", None) for node in nodes}
    named |= {node.asname for node in nodes if isinstance(node, ast.alias)}
    named |= {node.id for node in nodes if isinstance(node, ast.Name)}
    if not named & {"build_model", "*"}:
        what = f"{path.name} defines no build_model()"
        yield problem(key, what, "define build_model() there, which returns the model to train")


def problem(key: str, what: str, fix: str) -> Problem:
    """A value of a request that the skill cannot have."""
    return Problem(code="H033", what=what, where=key, fix=fix)

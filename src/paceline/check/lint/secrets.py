"""Secrets in the files themselves: whoever gets the repository or the run's folder gets them."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, INFO, Fault, findings
from paceline.check.lint.facts.source import Unreadable, tree_of
from paceline.job.secrets import find_in_lines

SECRET = "secret-in-file"


LOOKS_REAL = ", and looks like a real one"
"""Said of a value that its name and its letters make a secret, and no issuer's form."""


def check_secrets_in(path: str, text: str, *, in_code: bool) -> Iterator[Finding]:
    """One finding a line; the secret itself is in none.

    An error where the value has a form that its issuer documents, or is named like a secret and
    looks made; the latter is a hint in a docstring, which shows how a thing is called. A word that
    is only named like one is a hint: in others' code such values were mostly names and places for
    one.
    """
    if path.endswith(".ipynb"):
        text = text.replace('\\"', '"')
    is_data = path.endswith((".json", ".jsonl"))
    shown: frozenset[int] | None = None
    for secret in find_in_lines(text, "code" if in_code else "json" if is_data else "text"):
        what, level = f"the line holds {secret.kind}", ERROR
        if secret.certainty == "made":
            shown = _docstrings(text) if shown is None else shown
            level = INFO if secret.line in shown else ERROR
            what += LOOKS_REAL
        elif secret.certainty == "word":
            level = INFO
        yield from findings(path, [Fault(SECRET, secret.line, f"{what} (not shown)", None, level)])


def _docstrings(text: str) -> frozenset[int]:
    """Lines of a program that are text alone; none of what is no program."""
    try:
        tree = tree_of(text)
    except Unreadable:
        return frozenset()
    return frozenset(
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )

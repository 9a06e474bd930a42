"""Secrets in the files themselves: whoever gets the repository or the run's folder gets them."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, INFO, found
from paceline.check.lint.source import is_test
from paceline.job.secrets import find_in_lines

SECRET = "secret-in-file"


def check_secrets_in(path: str, text: str, *, in_code: bool) -> Iterator[Finding]:
    """One finding a line; the secret itself is in none.

    A value that is only named like a secret is a hint where it looks like a word, and in tests,
    whose passwords are made up, and in docstrings, which show how something is called.
    """
    if path.endswith(".ipynb"):
        text = text.replace('\\"', '"')
    is_data = path.endswith((".json", ".jsonl"))
    quoted = _in_long_strings(text) if in_code else frozenset()
    for secret in find_in_lines(text, "code" if in_code else "json" if is_data else "text"):
        is_made = secret.certainty == "made" and not is_test(path) and secret.line not in quoted
        level = ERROR if is_made or secret.certainty == "issued" else INFO
        what = f"the line holds {secret.kind} (not shown)"
        yield found(SECRET, path, secret.line, what, level=level)


_LONG_STRING = re.compile(r"(\"\"\"|''')[\s\S]*?\1")


def _in_long_strings(text: str) -> frozenset[int]:
    """Lines of a program that stand in strings of several lines."""
    found: set[int] = set()
    for match in _LONG_STRING.finditer(text):
        first = text.count("\n", 0, match.start()) + 1
        found.update(range(first, first + match[0].count("\n") + 1))
    return frozenset(found)

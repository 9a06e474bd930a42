"""Secrets in the files themselves: whoever gets the repository or the run's folder gets them."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, found
from paceline.job.secrets import find_in_lines


def check_secrets_in(path: str, text: str, *, in_code: bool) -> Iterator[Finding]:
    """One finding a line; the secret itself is in none."""
    for line, kind in find_in_lines(text, in_code=in_code):
        yield found("secret-in-file", ERROR, path, line, f"the line holds {kind} (not shown)")

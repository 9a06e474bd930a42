"""Secrets in the files themselves: whoever gets the repository or the run's folder gets them."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, INFO, found
from paceline.job.secrets import find_in_lines

SECRET = "secret-in-file"


def check_secrets_in(path: str, text: str, *, in_code: bool) -> Iterator[Finding]:
    """One finding a line; the secret itself is in none.

    An error where the value has a form that its issuer documents; what is only named like a secret
    is a hint: in others' code such values were mostly names, places for one, and tests' own.
    """
    if path.endswith(".ipynb"):
        text = text.replace('\\"', '"')
    is_data = path.endswith((".json", ".jsonl"))
    for secret in find_in_lines(text, "code" if in_code else "json" if is_data else "text"):
        level = ERROR if secret.certainty == "issued" else INFO
        what = f"the line holds {secret.kind} (not shown)"
        yield found(SECRET, path, secret.line, what, level=level)

"""Keys and passwords in a job file: found before anything of it is kept or shown.

A job file goes into the run's folder, into rendered files and into messages. Known are the forms
that issuers document, values of what is named like a secret (`job/secret_names.py`), and what well
known commands take for one. Leaves out: a secret that looks like any other word, under a name that
says nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import Problem
from paceline.job.secret_names import (
    Form,
    find_entries,
    find_in_text,
    find_under_name,
    flag_name,
    is_harmless,
    says_what_it_is,
)
from paceline.job.section import shipped
from paceline.job.yaml_text import Place, dotted, where_in

_ROWS = shipped("secret_forms.toml")
_FORMS: Mapping[str, re.Pattern[str]] = {
    kind: re.compile(row["form"]) for kind, row in _ROWS.items()
}
"""What it is -> what it looks like."""

_HINTS: Mapping[str, Sequence[str]] = {kind: row["hints"] for kind, row in _ROWS.items()}
"""What it is -> one of these is in it: found much faster than the form."""


def check_secrets(
    values: Any, lines: Mapping[Place, int], source: str, path: Place = ()
) -> Iterator[Problem]:
    """J013 for every value that is a key or a password. The value itself is never shown.

    Args:
        values: What a file says, before anything else is made of it.
        lines: Line of each path; 0 for what `--set` gave.
        source: The file's name, for messages.
        path: Where in the file the values are.
    """
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from check_secrets(key, lines, source, (*path, _beginning(key)))
            yield from check_secrets(inner, lines, source, (*path, str(key)))
    elif isinstance(values, list):
        flag = None
        for place, inner in enumerate(values):
            inside = (*path, place)
            if flag is not None and isinstance(inner, str) and not inner.startswith("-"):
                kind = find_under_name(flag, inner)  # `[--token, VALUE]`
                if kind is not None:
                    yield _problem(kind, lines, source, inside)
                    flag = None
                    continue
            flag = flag_name(inner) if isinstance(inner, str) else None
            yield from check_secrets(inner, lines, source, inside)
    elif isinstance(values, (str, int)) and not isinstance(values, bool):
        text = str(values)
        kind = find_secret(text)
        is_named = bool(path) and isinstance(path[-1], str) and path[-1] != _beginning(text)
        if kind is None and is_named and path[-2:-1] != ("secrets",):  # those are names of secrets
            kind = find_under_name(str(path[-1]), text)
        if kind is not None:
            yield _problem(kind, lines, source, path)


def _beginning(key: object) -> str:
    """A key as its place names it, where the key may be a secret (an AWS key: 20 letters)."""
    return f"{str(key)[:4]}..."


def find_secret(text: str) -> str | None:
    """What kind of secret a line of text holds, if any."""
    kind = next((name for name, form in _FORMS.items() if _holds(form, text)), None)
    named = find_in_text(text) if kind is None else None
    return named.kind if named is not None else kind


def _holds(form: re.Pattern[str], text: str) -> bool:
    """Whether a text has a secret of this form, and not the place for one (`hf_xxxxxxxx`)."""
    return any(
        "value" in form.groupindex or not _PLACE.search(match[0]) for match in form.finditer(text)
    )


def find_issued(text: str) -> Iterator[str]:
    """Kinds of secrets of a form that issuers document, in a text of any length. What documentation
    shows as an example (`...EXAMPLE`) is none.

    >>> list(find_issued("use hf_" + "a1" * 17))
    ['a Hugging Face token']
    """
    for name, hints in _HINTS.items():
        if any(hint in text for hint in hints) and any(
            map(_is_issued, _FORMS[name].finditer(text))
        ):
            yield name


def _is_issued(match: re.Match[str]) -> bool:
    """Whether it is no example, no place of a password in a URL (`user:{password}@`), and not what
    a database for development has (`postgres:postgres@`)."""
    value = match.groupdict().get("value")
    if value is not None and (says_what_it_is(value) or match[0].startswith(f"://{value}:")):
        return False
    if value is not None:
        return not is_harmless(value)
    return not match[0].endswith("EXAMPLE") and not _PLACE.search(match[0])


_PLACE = re.compile(r"[xX*]{8}$|(?i:abcdefgh|hgfedcba)|12345678|87654321")
"""In a place for a token: `hf_xxxxxxxx`, or letters and digits as one counts, `sk-abcdefgh`."""

_THIS_MACHINE = re.compile(
    r"@(localhost|127\.|0\.0\.0\.0|\[::1\]|[\w.-]*\bexample\b)", re.IGNORECASE
)
"""After a password in a URL: a server for trying out, or one that is none (RFC 2606)."""

_NAMED_SO = re.compile("pass|secret|pwd|token|key|login|bearer|basic", re.IGNORECASE)
"""In every name that `find_under_name` takes for a secret's, and in every call that takes one."""

_LONGEST_LINE = 20_000
"""Characters. Longer lines (pictures in notebooks, minified JSON) are searched for issued forms."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A line of a file that holds one."""

    line: int
    """From 1."""

    kind: str
    certainty: Literal["issued", "made", "word"]
    """It has a form that an issuer documents; it is named like a secret and looks made; or it is
    named like one and looks like a word."""


def find_in_lines(text: str, form: Form = "text") -> Iterator[Secret]:
    """Every secret in a file's text, one a line.

    >>> [one] = find_in_lines('token = key\\napi_key = "hunter2hunter2"', "code")
    >>> one.line, one.kind
    (2, 'the value of `api_key`, which is named like a secret')
    """
    issued = {name: _FORMS[name] for name in find_issued(text)}
    entries = {text.count("\n", 0, place) + 1: named for place, named in find_entries(text, form)}
    may_be_named = _NAMED_SO.search if form != "text" else bool  # commands take some without a name
    for number, line in enumerate(text.split("\n"), start=1):
        if not issued and number not in entries and not may_be_named(line):
            continue
        forms = (
            name
            for name, form in issued.items()
            if (
                len(line) <= _LONGEST_LINE or "value" not in form.groupindex
            )  # `://a:b@` of a model
            and any(map(_is_issued, form.finditer(line)))
        )
        kind = next(forms, None)
        if kind is not None:
            in_url = "value" in _FORMS[kind].groupindex  # of anybody's own making
            is_here = in_url and _THIS_MACHINE.search(line)
            yield Secret(number, kind, "word" if is_here else "made" if in_url else "issued")
        elif len(line) <= _LONGEST_LINE and (
            named := find_in_text(line, form) or entries.get(number)
        ):
            yield Secret(number, named.kind, "made" if named.looks_made else "word")


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line in which a note stands for every word that is a secret, or holds one."""
    found: list[str] = []
    flag = None
    for word in words:
        kind = find_under_name(flag, word) if flag is not None else None
        kind = kind or find_secret(word)
        found.append(f"[left out: {kind}]" if kind is not None else word)
        flag = flag_name(word)
    return found


def _problem(kind: str, lines: Mapping[Place, int], source: str, path: Place) -> Problem:
    return Problem(
        code="J013",
        what=f"`{dotted(path)}` holds {kind}, which would be kept in the run's folder",
        where=where_in(lines, source)(path),
        fix="take it out, put it into the environment of the machines that need it, and revoke it "
        "if others have seen the file",
    )

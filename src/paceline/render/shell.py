"""Shell text: quoting, and the first lines that every script has."""

import shlex
from collections.abc import Sequence

from paceline.errors import JobError

_UNSAFE = set("\n\r\0")


def quote(text: str) -> str:
    """One word of a POSIX shell that is never read as anything else.

    >>> quote("my job; rm -rf /")
    "'my job; rm -rf /'"
    """
    return shlex.quote(text)


def command(*words: str) -> str:
    """A command line, each word quoted.

    >>> command("torchrun", "--nproc-per-node=2", "my train.py")
    "torchrun --nproc-per-node=2 'my train.py'"
    """
    return " ".join(quote(word) for word in words)


def script(header: Sequence[str], *lines: str, directives: Sequence[str] = ()) -> str:
    """A whole bash script that ends at the first error.

    Args:
        header: Lines of its comment, without `#`.
        lines: Its commands.
        directives: What must stand before any command, such as `#SBATCH --nodes=2`.
    """
    comment = ["#" if not line else f"# {line}" for line in header]
    start = ["#!/usr/bin/env bash", *directives, *comment, "set -euo pipefail"]
    return "\n".join([*start, *lines, ""])


def check_one_line(text: str, *, what: str, where: str) -> str:
    """The text, which goes into a line of a file.

    Raises:
        JobError: `H003`, it has a line break or a NUL.
    """
    if _UNSAFE & set(text):
        raise JobError.of(
            code="H003",
            what=f"{what} {text!r} has a line break",
            where=where,
            fix="write it in one line",
        )
    return text


def presence_lines(paths: Sequence[str], *, unless: Sequence[str] = ()) -> list[str]:
    """Lines that end a script on a machine that lacks one of some paths.

    Args:
        paths: Files or folders.
        unless: Variables that name others in their place.
    """
    if not paths:
        return []
    lines = [
        f"for needed in {command(*paths)}; do",
        '  if [ ! -e "$needed" ]; then echo "$(uname -n) has no $needed" >&2; exit 2; fi',
        "done",
    ]
    if not unless:
        return lines
    given = "".join(f"${{{name}:-}}" for name in unless)
    return [f'if [ -z "{given}" ]; then', *(f"  {line}" for line in lines), "fi"]

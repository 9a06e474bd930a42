"""Lines that a program wrote, as text that no terminal or page takes for something else."""

import re
import unicodedata

MOST_CHARACTERS = 4096
"""Characters of a line. A guess: what a person reads of one."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(line: str) -> str:
    """A line without colours, titles, control or direction characters, and cut where it is long.

    >>> plain("\\x1b[31mred\\x1b[0m\\u202e!")
    'red!'
    """
    kept = _CONTROL.sub("", _ESCAPES.sub("", line[: 4 * MOST_CHARACTERS]))
    if not kept.isascii():  # C: control, format, surrogates, private use
        kept = "".join(
            each for each in kept if each in "\t\n" or unicodedata.category(each)[0] != "C"
        )
    if len(kept) <= MOST_CHARACTERS:
        return kept
    return f"{kept[:MOST_CHARACTERS]} ... ({len(line)} characters)"

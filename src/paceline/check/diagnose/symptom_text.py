"""A symptom that a person tells in words ("training hangs, GPU utilization 0%"): its usual causes.

Leaves out logs: a text with a decimal number, a setting (`name=value`) or many lines is none.
"""

import re
from collections.abc import Iterator, Sequence

from paceline.catalog.failure import load_failures
from paceline.catalog.symptom import load_symptoms
from paceline.check.diagnose.candidate import Candidate
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.precedence import Level
from paceline.check.diagnose.similar import likeness_to_any

_MOST = 400
"""Characters. A convention: three sentences."""

_LATER = re.compile(
    r"(?i)\b(?:step|iteration|iter|epoch)s? *#?(?!1\b)[1-9]"
    r"|\b(?!1 )[1-9][\d,]*k? (?:step|iteration|epoch)s"
)
"""A step above the first, as words give it: what shows `at_start` is then not the cause."""

_LOG = re.compile(r"\d\.\d|\w[=:]\S|\d:\d|[{}|\\]|\n.*\n.*\n.*\n")


def is_told(text: str) -> bool:
    """Whether a text reads as a person's words and not as a program's output.

    >>> is_told("loss is nan after 200 steps"), is_told("step 3 loss 2.31")
    (True, False)
    """
    return len(text) <= _MOST and " " in text.strip() and not _LOG.search(text)


def told_causes(
    text: str, source: str, printed: Sequence[str], *, has_failed: bool
) -> Iterator[Candidate]:
    """The causes of the symptom that the words are of, then failures described in like words.

    Args:
        printed: Failures whose own message is in the words. They are possible and no more: who
            says that a program printed it may have left out what came before.
        has_failed: The words say that something failed, as any error's words do: no likeness.
    """
    line = Line(source=source, number=1, raw=text.strip(), message=text.strip())
    failures, like = load_failures(), likeness_to_any(text)
    is_later = _LATER.search(text) is not None
    ranked: dict[str, tuple[tuple[float, float, float], str, str | None]] = {}
    for symptom in load_symptoms().values():
        if not any(form.search(text) for form in (*symptom.words, *symptom.log)):
            continue
        for place, cause in enumerate(symptom.causes):
            speaks = cause.id in printed or (
                cause.seen is not None and cause.seen.search(text) is not None
            )
            if speaks or not cause.only:
                against = cause.unless is not None and cause.unless.search(text) is not None
                against |= is_later and failures[cause.id].at_start
                rank = (-1.0 - speaks + against / 2, place, -like.get(cause.id, 0.0))
                ranked.setdefault(cause.id, (rank, symptom.title, cause.check))
    for name in dict.fromkeys((*printed, *(() if has_failed or ranked else like))):
        first = -1.5 if name in printed else 0.0
        late = float(is_later and failures[name].at_start)
        ranked.setdefault(name, ((first, late, -like.get(name, 0.0)), failures[name].title, None))
    for name, (_, what, check) in sorted(ranked.items(), key=lambda each: each[1][0]):
        yield Candidate(
            id=name,
            level=Level.POSSIBLE,
            confidence=Confidence.POSSIBLE,
            lines=[line],
            what=what,
            check=check,
        )

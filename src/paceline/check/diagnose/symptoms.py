"""Causes that what is seen may have, where no line names one: the catalog's symptoms.

They are possible and no more, each with the check that decides. What in the log speaks for one
moves it before those that nothing speaks for.
"""

from collections.abc import Iterator, Sequence

from paceline.catalog.symptom import Symptom, load_symptoms
from paceline.check.diagnose.candidate import Candidate
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.hang import around
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.precedence import GENERAL, SYMPTOMS, Level
from paceline.check.diagnose.seen import Seen

_MAX_LINES = 200
_CERTAIN = Confidence.CERTAIN
_SAY_NOT_WHY = SYMPTOMS | GENERAL | {"user-exception"}


def possible_causes(seen: Seen, known: Sequence[Candidate]) -> Iterator[Candidate]:
    """What else may be the cause of what is seen.

    Args:
        known: Candidates so far, in order; where the first is certain, only those that may be taken
            for it are said, and only where something speaks for them.
    """
    lines = salient_lines(seen)
    first = known[0] if known and known[0].level < Level.FOLLOWS else None
    is_certain = first is not None and first.confidence is Confidence.CERTAIN
    is_certain = is_certain and first is not None and first.id not in _SAY_NOT_WHY
    if first is not None and first.id == "user-exception" and first.confidence is _CERTAIN:
        known, lines = _without_consequences(known, lines)
    text = None
    for symptom in load_symptoms().values():
        shown = _shown(symptom, lines, first if is_certain else None, known)
        if not shown:
            continue
        text = text if text is not None else _text(seen, lines)
        for place, cause in enumerate(symptom.causes):
            spoken_for = cause.seen is not None and cause.seen.search(text) is not None
            if not spoken_for and (cause.only or is_certain):
                continue
            yield Candidate(
                id=cause.id,
                level=Level.POSSIBLE if spoken_for else Level.FITS,
                confidence=Confidence.POSSIBLE,
                lines=shown,
                what=symptom.title,
                count=len(shown),
                order=place,
                check=cause.check,
            )


def _without_consequences(
    known: Sequence[Candidate], lines: Sequence[Line]
) -> tuple[Sequence[Candidate], list[Line]]:
    """What is left to explain, where the program's own error explains why others waited for it."""
    follows = [each for each in known if each.level >= Level.FOLLOWS]
    told = {(line.source, line.number) for each in follows for line in each.lines}
    left = [line for line in lines if (line.source, line.number) not in told]
    return [each for each in known if each.level < Level.FOLLOWS], left


def _shown(
    symptom: Symptom, lines: Sequence[Line], certain: Candidate | None, known: Sequence[Candidate]
) -> list[Line]:
    """The lines that show a symptom; none where it is not seen."""
    if certain is not None:
        return list(certain.lines) if certain.id in symptom.of else []
    owned = [line for each in known if each.id in symptom.of for line in each.lines]
    return owned or [line for line in lines if any(form.search(line.raw) for form in symptom.log)]


def salient_lines(seen: Seen) -> list[Line]:
    """The lines that say that something failed: exceptions, errors, ends of processes, patterns."""
    lines = [raised.line for raised in seen.raised[:_MAX_LINES]]
    lines += [each.line for each in list(seen.error_lines.values())[:_MAX_LINES]]
    lines += [each.line for each in seen.exits[:_MAX_LINES]]
    for sighting in seen.sightings.values():
        lines += [line for line, _ in sighting.first]
    found = {(line.source, line.number): line for line in lines}
    return sorted(found.values(), key=lambda line: (line.source, line.number))


def _text(seen: Seen, lines: Sequence[Line]) -> str:
    return "\n".join([around(seen), *(line.raw for line in lines)])

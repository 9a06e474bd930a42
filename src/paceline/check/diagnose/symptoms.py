"""Causes that are possible where no line names one: by the catalog's symptoms, or by like words.

A symptom is seen in a log, or told in words ("training hangs, GPU utilization 0%"). Its causes each
have the check that decides; what speaks for one moves it before the others. The last resort are
failures whose words are like those of lines that no pattern knows, and unsure. Words are weighed by
how few failures of the catalog have them (inverse document frequency, as in Robertson and Zaragoza,
The Probabilistic Relevance Framework, 2009). A failure is named only where it holds most of the
weight of a line's words: what nothing in the catalog is about stays without a name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import fsum, log

from paceline.catalog.failure import Effect, Failure, load_failures
from paceline.catalog.symptom import Symptom, load_symptoms
from paceline.check.diagnose.candidate import GENERAL, SYMPTOMS, Candidate, Level
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.hang import around, unlike_the_others
from paceline.check.diagnose.line import Line
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
    odd = () if is_certain else unlike_the_others(seen, known)
    for symptom in load_symptoms().values():
        shown = _shown(symptom, lines, first if is_certain else None, known)
        if not shown:
            continue
        text = text if text is not None else _said(seen, lines)
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
                rank=odd[0] if odd else None,
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


def _said(seen: Seen, lines: Sequence[Line]) -> str:
    return "\n".join([around(seen), *(line.raw for line in lines)])


_MOST = 400
"""Characters. A convention: three sentences."""

_LATER = re.compile(
    r"(?i)\b(?:step|iteration|iter|epoch)s? *#?(?!1\b)[1-9]"
    r"|\b(?!1 )[1-9][\d,]*k? (?:step|iteration|epoch)s"
)
"""A step above the first, as words give it: what shows `at_start` is then not the cause."""

_LOG = re.compile(
    r"\d\.\d|\w[=:]\S|\d:\d|[{}|\\]|\n.*\n.*\n.*\n"
    r"|(?im:^\W*(?:step|iter(?:ation)?|epoch)\W*\d+\W+loss\W+\d)"
)

TROUBLE = re.compile(
    r"(?i)\?|\b(?:why|errors?|fail(?:s|ed|ures?)?|crash\w*|hangs?|stuck|slow\w*|wrong)\b"
)
"""A question, or a word for something that is wrong: a few lines of a healthy log have none."""


def is_told(text: str) -> bool:
    """Whether a text reads as a person's words and not as a program's output.

    >>> is_told("loss is nan after 200 steps"), is_told("step 3 loss 2"), is_told("loss 2.31")
    (True, False, False)
    """
    return len(text) <= _MOST and " " in text.strip() and not _LOG.search(text)


def told_causes(
    text: str, source: str, printed: Sequence[str], *, by_likeness: bool
) -> Iterator[Candidate]:
    """The causes of the symptom that the words are of, then failures described in like words.

    Args:
        printed: Failures whose own message is in the words. They are possible and no more: who
            says that a program printed it may have left out what came before.
        by_likeness: Without a symptom, failures described in like words are named. Words say little
            where they are those of any error, or of a log that shows nothing wrong.
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
    for name in dict.fromkeys((*printed, *(like if by_likeness and not ranked else ()))):
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


_LEAST_COVERED = 0.45
"""Share of a line's weight that must be in a failure's words. Chosen on tests/check/logs, where
lines of failures that were left out of the catalog reach it in fewer than one case of ten."""

_LEAST_WORDS = 3
_MOST_LINES = 12
_UNSEEN = {Effect.SILENT, Effect.INFO, Effect.SECONDARY, Effect.FALLBACK}
"""Failures that print nothing, or nothing of their own."""

_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]{2,}(?![a-z])|[a-z]{3,}")
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/|0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b")


def look_alikes(lines: Sequence[Line], *, most: int = 3) -> list[tuple[str, Line, float]]:
    """(failure, line, share of the line's weight that the failure's words hold), the likest first.

    Args:
        lines: That say that something failed; the first dozen are looked at.
        most: How many failures at most.
    """
    best: dict[str, tuple[float, Line, float]] = {}
    for line in lines[:_MOST_LINES]:
        for name, (weight, covered) in _likeness(line.message, quiet=False).items():
            if name not in best or best[name][0] < weight:
                best[name] = (weight, line, covered)
    ordered = sorted(best.items(), key=lambda each: -each[1][0])
    return [(name, line, covered) for name, (_, line, covered) in ordered[:most]]


def likeness_to_any(text: str) -> dict[str, float]:
    """Failure -> weight of the words that it shares with a text, those that print nothing too."""
    return {name: weight for name, (weight, _) in _likeness(text, quiet=True).items()}


def words_of(text: str) -> set[str]:
    """Words without numbers, addresses and paths; `DataLoaderTimeout` is three.

    >>> sorted(words_of("NCCLError: 12 in /opt/x/lib/a.py"))
    ['error', 'nccl', 'py']
    """
    found = _WORD.findall(_PATH.sub(" ", text))
    return {word.lower() for word in found if len(word) > 1} - _EMPTY


_EMPTY = frozenset(
    {"the", "and", "for", "not", "was", "were", "with", "this", "that", "from", "are", "has"}
    | {"have", "been", "you", "your", "can", "but", "all", "any", "of", "to", "in", "is", "it"}
    | {"or", "be", "by", "on", "at", "an", "as", "if", "no", "so", "do", "file", "line"}
    | {"module", "call", "last", "most", "recent"}
)
"""Words of any line, and of every traceback."""


def _likeness(text: str, *, quiet: bool) -> dict[str, tuple[float, float]]:
    """Failure -> (weight of the common words, its share of the whole), where that is enough."""
    words, documents = words_of(text), _documents(quiet)
    holds = _num_documents(quiet)
    weights = {word: log(1 + (len(documents) + 0.5) / (holds[word] + 0.5)) for word in words}
    whole, found = fsum(weights.values()), {}
    for name, known in documents.items():
        weight = fsum(weights[word] for word in words & known)
        if len(words & known) >= _LEAST_WORDS and weight >= _LEAST_COVERED * whole:
            found[name] = (weight, weight / whole)
    return found


@cache
def _documents(quiet: bool) -> Mapping[str, frozenset[str]]:
    """Failure -> the words of what the catalog shows and says of it."""
    return {
        failure.id: frozenset(_words(failure))
        for failure in load_failures().values()
        if quiet or (failure.shows and failure.effect not in _UNSEEN)
    }


@cache
def _num_documents(quiet: bool) -> Counter[str]:
    return Counter(word for words in _documents(quiet).values() for word in words)


def _words(failure: Failure) -> set[str]:
    forms = (re.sub(r"\\.|[^\w ]", " ", text) for text in (*failure.log, *failure.weak_log))
    return words_of("\n".join([*failure.shows, failure.title, failure.why, *forms]))

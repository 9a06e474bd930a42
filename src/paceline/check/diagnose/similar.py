"""Failures whose words are like those of lines that no pattern knows: a last resort, and unsure.

Words are weighed by how few failures of the catalog have them (inverse document frequency, as in
Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009). A failure is named only where
it holds most of the weight of a line's words: what nothing in the catalog is about stays without a
name.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import fsum, log

from paceline.catalog.failure import Effect, Failure, load_failures
from paceline.check.diagnose.line import Line

_LEAST_COVERED = 0.45
"""Share of a line's weight that must be in a failure's words. Chosen on tests/check/logs, where
lines of failures that were left out of the catalog reach it in fewer than one case of ten."""

_LEAST_WORDS = 3
_MAX_LINES = 12
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
    for line in lines[:_MAX_LINES]:
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

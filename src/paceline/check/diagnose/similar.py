"""Failures whose words are like those of lines that no pattern knows: a last resort, and unsure.

BM25 over what the catalog shows and says of each failure (Robertson and Zaragoza, The Probabilistic
Relevance Framework, 2009). A failure is named only where it holds most of the weight of a line's
words: what nothing in the catalog is about stays without a name.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log

from paceline.catalog.failure import Effect, Failure, load_failures
from paceline.check.diagnose.line import Line

_K1, _B = 1.2, 0.5
"""Constants of the paper's section 3.2; b is lower since these texts differ little in length."""

_LEAST_COVERED = 0.45
"""Share of a line's weight that must be in a failure's words. Chosen on tests/check/logs, where
lines of failures that were left out of the catalog reach it in fewer than one case of ten."""

_LEAST_WORDS = 3
_MAX_LINES = 12
_UNSEEN = {Effect.SILENT, Effect.INFO, Effect.SECONDARY, Effect.FALLBACK}
"""Failures that print nothing, or nothing of their own."""

_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]{2,}(?![a-z])|[a-z]{3,}")
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/|0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b")


@dataclass(frozen=True, slots=True)
class Likeness:
    """A failure whose words are like a line's."""

    id: str
    line: Line
    covered: float
    """Share of the line's weight that the failure's words hold, 0 to 1."""


def look_alikes(lines: Sequence[Line], *, most: int = 3) -> list[Likeness]:
    """Failures whose words are most like one of some lines; the likest first.

    Args:
        lines: That say that something failed; the first dozen are looked at.
        most: How many failures at most.
    """
    best: dict[str, tuple[float, Likeness]] = {}
    for line in lines[:_MAX_LINES]:
        words = words_of(line.message)
        if len(words) < _LEAST_WORDS:
            continue
        for name, (score, covered) in _scores(words).items():
            if covered >= _LEAST_COVERED and (name not in best or best[name][0] < score):
                best[name] = (score, Likeness(name, line, covered))
    ordered = sorted(best.values(), key=lambda each: -each[0])
    return [each for _, each in ordered[:most]]


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


def likeness_to_any(text: str) -> dict[str, float]:
    """Failure -> how like its texts some words are (BM25), those that print nothing as well."""
    found = _scores(words_of(text), quiet=True)
    return {name: score for name, (score, covered) in found.items() if covered >= _LEAST_COVERED}


@dataclass(frozen=True, slots=True)
class _Index:
    counts: Mapping[str, Counter[str]]
    lengths: Mapping[str, int]
    rarity: Mapping[str, float]
    """Inverse document frequency of each word."""

    rarest: float
    mean_length: float


@cache
def _index(quiet: bool) -> _Index:
    counts = {
        failure.id: Counter(_document(failure))
        for failure in load_failures().values()
        if quiet or (failure.shows and failure.effect not in _UNSEEN)
    }
    num = len(counts)
    holds = Counter(word for each in counts.values() for word in each)
    rarity = {word: log(1 + (num - n + 0.5) / (n + 0.5)) for word, n in holds.items()}
    lengths = {name: sum(each.values()) for name, each in counts.items()}
    return _Index(
        counts=counts,
        lengths=lengths,
        rarity=rarity,
        rarest=log(1 + (num + 0.5) / 0.5),
        mean_length=sum(lengths.values()) / max(num, 1),
    )


def _document(failure: Failure) -> list[str]:
    texts = [*failure.shows, *failure.shows, failure.title, failure.title, failure.why]
    texts += [re.sub(r"\\.|[^\w ]", " ", text) for text in (*failure.log, *failure.weak_log)]
    return [word for text in texts for word in words_of(text)]


def _scores(words: set[str], *, quiet: bool = False) -> dict[str, tuple[float, float]]:
    """Failure -> (BM25, share of the weight that it covers)."""
    index = _index(quiet)
    weights = {word: index.rarity.get(word, index.rarest) for word in words}
    whole = sum(weights.values())
    found = {}
    for name, counts in index.counts.items():
        common = [word for word in words if word in counts]
        if len(common) < _LEAST_WORDS:
            continue
        scale = _K1 * (1 - _B + _B * index.lengths[name] / index.mean_length)
        score = sum(
            weights[word] * counts[word] * (_K1 + 1) / (counts[word] + scale) for word in common
        )
        found[name] = (score, sum(weights[word] for word in common) / whole)
    return found

"""Finds the lines of a block that patterns match, looking at each kind of line once.

Logs repeat themselves: with every digit read as 0, some hundred kinds of line are most of a log. A
new kind is searched for words that the patterns need (by a few letters of each), then for those
patterns with their digits left open. A line of a kind that none of them can match is known by its
kind alone.
"""

import re
import re._parser as parser  # type: ignore[import-not-found]
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.catalog.failure import load_benign_lines, load_failures
from paceline.catalog.load import read_shipped


class Kind(StrEnum):
    """What a pattern's line is for."""

    LOG = "log"
    """A failure of the catalog."""

    WEAK = "weak"
    """Perhaps a failure of the catalog."""

    BENIGN = "benign"
    """A line that looks like an error and is none."""

    READER = "reader"
    """Something that one of our readers takes apart: tracebacks, exit codes, NCCL's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One expression and what it is of."""

    name: str
    kind: Kind
    text: re.Pattern[str]


READERS: Mapping[str, Sequence[str]] = read_shipped("log_lines.toml")["readers"]
"""Reader -> the lines it wants."""


_FLAGS = re.MULTILINE | re.IGNORECASE
"""Libraries change the case of their messages: JAX's `Coordination service` was `coordination`."""


@cache
def all_patterns() -> tuple[Pattern, ...]:
    """Every expression, the catalog's first."""
    found = []
    for failure in load_failures().values():
        for kind, texts in ((Kind.LOG, failure.log), (Kind.WEAK, failure.weak_log)):
            found += [
                Pattern(name=failure.id, kind=kind, text=re.compile(text, _FLAGS))
                for text in texts
                if "\\n" not in text  # reaches over lines: `judge` knows those
            ]
    found += [
        Pattern(name=name, kind=Kind.READER, text=re.compile(text, re.MULTILINE))
        for name, texts in READERS.items()
        for text in texts
    ]
    found += [
        Pattern(name=line.id, kind=Kind.BENIGN, text=re.compile(text, _FLAGS))
        for line in load_benign_lines()
        for text in line.log
    ]
    return tuple(found)


@cache
def benign() -> re.Pattern[str]:
    """A line that looks like an error and is none."""
    texts = [f"(?:{text})" for line in load_benign_lines() for text in line.log]
    return re.compile("|".join(texts), re.IGNORECASE)


_KEEP_BYTES = 16 << 20
"""Bytes of kinds that are remembered. A guess: a hundred thousand kinds of usual lines."""

_KEEP_FORMS = 50_000
"""Kinds without their ids that are remembered. A guess: 8 MB of usual lines."""

_ENDS_OF_LINE = 16 * 1024
"""Bytes at the beginning and at the end of a very long line that are searched."""

_LINE_FEED = 10
_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_IDS = re.compile(
    rb"[0a-fA-F]{8}(?:"
    rb"(?:(?<![\w.].{8})|(?<=\b0x.{8}))(?:(?<![a-fA-F]{8})|(?=[a-fA-F]*0))"
    rb"[0a-fA-F]*+(?:(?:-[0a-fA-F]{4}){3}-[0a-fA-F]{12})?+(?!\w|[-+]0)"
    rb"|(?<=0{8})(?<![0a-fA-F].{8})0*+(?![a-fA-F]))"
)
"""UUIDs, hashes, addresses and long fractions: a kind for each would be a kind for each line.
Shorter names that are hexadecimal numbers too (a100, bf16) are words of patterns."""

_ID = b"0" * 8
_FEW_BYTES = 4096
"""Bytes of a few lines, for which the calls of numpy take longer than an expression. A guess."""

_IS_HEX = bytes(byte in b"0abcdefABCDEF" for byte in range(256))
_TOKENS = re.compile(
    r"\(\?<?![^()]*\)|\\x..|\\.|\{\d+(?:,\d*)?\}|\[\^?\]?(?:\\.|[^\]])*\]|\(\?P<\w+>|\d"
)


Hit = tuple[int, int, Sequence[int], Sequence[int]]
"""Start and end of a line in its block, without its line end; the numbers of the patterns that
match it, and of those of harmless lines that may. A plain tuple, which pickles fast."""


class _Kind(NamedTuple):
    """What is known of a kind of line; None of one that no pattern matches."""

    sure: Sequence[int]
    """Patterns that match every line of the kind."""

    open: Sequence[int]
    """Patterns that match some of its lines, as their digits and ids are."""

    benign: Sequence[int]


class Matcher:
    """Looks for patterns, by their numbers in `all_patterns`, in blocks of whole lines."""

    def __init__(self, numbers: Iterable[int]) -> None:
        patterns = all_patterns()
        self._benign = {at for at, each in enumerate(patterns) if each.kind is Kind.BENIGN}
        self._numbers = set(numbers) | self._benign
        self._likely: dict[frozenset[str], Sequence[int]] = {}
        self._kinds: dict[bytes, _Kind | None] = {}
        self._forms: dict[bytes, _Kind | None] = {}
        self._num_bytes = 0

    def find(self, block: bytes) -> list[Hit]:
        """The lines that patterns match, in order."""
        texts = with_zeros(block).split(b"\n")
        kinds = self._kinds
        if self._num_bytes > _KEEP_BYTES:  # most of them differ in ids, and come no more
            kinds.clear()
            self._num_bytes = 0
        if len(self._forms) > _KEEP_FORMS:
            self._forms.clear()
        if new := set(texts).difference(kinds):
            self._learn(list(new))
        found = [kinds[text] for text in texts]
        lines = np.flatnonzero(np.fromiter(map(bool, found), np.bool_, len(found)))
        feeds = np.flatnonzero(np.frombuffer(block, np.uint8) == _LINE_FEED)
        bounds = np.concatenate(([-1], feeds, [len(block)]))
        starts, ends = (bounds[lines] + 1).tolist(), bounds[lines + 1].tolist()
        hits: list[Hit] = []
        for kind, start, end in zip(filter(None, found), starts, ends, strict=True):
            numbers = kind.sure
            if kind.open:
                text = _readable(block[start:end])
                matching = [each for each in kind.open if _exact(each).search(text)]
                numbers = [*numbers, *matching]
            if numbers:
                hits.append((start, end, numbers, kind.benign))
        return hits

    def forget(self, numbers: Iterable[int]) -> None:
        """Look for these no longer."""
        if gone := self._numbers.intersection(numbers):
            self._numbers -= gone
            for known in (self._likely, self._kinds, self._forms):
                known.clear()

    def _learn(self, texts: Sequence[bytes]) -> None:
        joined = b"\n".join(texts)
        forms = without_ids(joined).split(b"\n")
        self._judge(list(set(forms).difference(self._forms)))
        self._num_bytes += len(joined)
        for text, form in zip(texts, forms, strict=True):
            kind = self._forms[form]
            if kind and form != text:  # ids may stand where a pattern matches
                kind = _Kind((), [*kind.sure, *kind.open], kind.benign)
            self._kinds[text] = kind

    def _judge(self, forms: Sequence[bytes]) -> None:
        self._forms.update(dict.fromkeys(forms))
        for line, words in _likely_words(b"\n".join(forms).lower()).items():
            form, text = forms[line], _readable(forms[line])
            small = text.lower()
            matching = [
                number
                for number in self._with_words(frozenset(word for word in words if word in small))
                if _open(number).search(text)
            ]
            benign = [each for each in matching if each in self._benign]
            sure = [n for n in matching if _open(n) is _exact(n) and n not in self._benign]
            still = [each for each in matching if each not in {*sure, *benign}]
            if sure or still:
                self._forms[form] = _Kind(sure, still, benign)

    def _with_words(self, words: frozenset[str]) -> Sequence[int]:
        if words not in self._likely:
            numbers = {number for word in words for number in _numbers_of_words()[word]}
            self._likely[words] = sorted(numbers & self._numbers)
        return self._likely[words]


@cache
def _exact(number: int) -> re.Pattern[str]:
    """A pattern without ^ and $: they are of the message, behind what loggers write in front."""
    text = all_patterns()[number].text
    bare = text.pattern.removeprefix("^").removesuffix("$")
    return text if bare == text.pattern else re.compile(bare, text.flags)


@cache
def _open(number: int) -> re.Pattern[str]:
    exact = _exact(number)
    opened = with_open_digits(exact.pattern)
    return exact if opened == exact.pattern else re.compile(opened, exact.flags)


@cache
def _numbers_of_words() -> Mapping[str, set[int]]:
    """The words that patterns need, and of which each is."""
    numbers_of: dict[str, set[int]] = {}
    for number in range(len(all_patterns())):
        for word in need_of(number).rarest():
            numbers_of.setdefault(word, set()).add(number)
    return numbers_of


@cache
def _words_with_grams() -> Mapping[bytes, Sequence[str]]:
    """Four letters of each word, those that fewest words have -> the words."""
    words = {word: word.encode() for word in _numbers_of_words()}
    grams = {
        word: [text[at : at + 4] for at in range(len(text) - 3)] for word, text in words.items()
    }
    counts = Counter(gram for each in grams.values() for gram in each)
    found: dict[bytes, list[str]] = {}
    for word, each in grams.items():
        found.setdefault(min(each, key=lambda gram: counts[gram]), []).append(word)
    return found


def _likely_words(text: bytes) -> Mapping[int, set[str]]:
    """Number of a line -> words of which it has four letters; all places at once, as numbers."""
    words_with, found = _words_with_grams(), dict[int, set[str]]()
    is_wanted = np.zeros(1 << 16, np.bool_)
    is_wanted[_hashed(np.frombuffer(b"".join(words_with), "<u4"))] = True
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_FEED)
    for shift in range(min(4, max(0, len(text) - 3))):
        letters = np.frombuffer(text, "<u4", count=(len(text) - shift) // 4, offset=shift)
        places = np.flatnonzero(is_wanted[_hashed(letters)]) * 4 + shift
        for at, line in zip(places.tolist(), np.searchsorted(ends, places).tolist(), strict=True):
            if words := words_with.get(text[at : at + 4]):
                found.setdefault(line, set()).update(words)
    return found


def _hashed(letters: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """16 bits of each four letters: a table of so many is looked up faster than they are sorted.

    Multiplied by 2**32 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return (letters * np.uint32(2654435769)) >> np.uint32(16)


def with_zeros(text: bytes) -> bytes:
    """The text with each digit as 0."""
    return text.translate(_ZEROS)


def without_ids(zeros: bytes) -> bytes:
    """A text whose digits are 0, with 8 of them for each id and for each long fraction.

    >>> without_ids(with_zeros(b"shard-3f2a9c81 loss 0.123456789012 a100 1.25e-05"))
    b'shard-00000000 loss 0.00000000 a000 0.00e-00'
    >>> without_ids(with_zeros(b"comm 0x7f3a5c0012ab opCount 0x1f"))
    b'comm 0x00000000 opCount 0x0f'
    """
    if len(zeros) < _FEW_BYTES:
        return _IDS.sub(_ID, zeros)
    parts, done = [], 0
    for start in _hex_runs(zeros):
        if start >= done and (found := _IDS.match(zeros, start)) is not None:
            parts += [zeros[done:start], _ID]
            done = found.end()
    return b"".join([*parts, zeros[done:]])


def _hex_runs(zeros: bytes) -> list[int]:
    """Where eight letters of hexadecimal numbers or more begin: an id begins at no other place.

    In lines of which few have ids, numpy is faster than to try an expression at every place (of the
    mixed log of benchmarks/diagnose_speed.py 1.3 and 2.0 ms a MB).
    """
    at_least = np.frombuffer(zeros.translate(_IS_HEX), np.bool_)
    for step in (1, 2, 4):
        at_least = at_least[:-step] & at_least[step:]
    begins = at_least.copy()
    begins[1:] &= ~at_least[:-1]
    return np.flatnonzero(begins).tolist()


def _readable(line: bytes) -> str:
    if len(line) > 2 * _ENDS_OF_LINE:
        line = line[:_ENDS_OF_LINE] + b" ... " + line[-_ENDS_OF_LINE:]
    return line.decode("utf-8", "replace")


def with_open_digits(pattern: str) -> str:
    r"""A pattern that matches wherever the given one does, and with any digits in place of any.

    >>> with_open_digits(r"exit code 13[79]\b(?! 0)")
    'exit code \\d\\d[79\\d]\\b'
    """
    return _TOKENS.sub(lambda token: _opened(token[0]), pattern)


def _opened(token: str) -> str:
    if token.isdigit():
        return r"\d"
    if token.startswith(("(?!", "(?<!")):  # what must not stand there: other digits might
        return ""
    if not token.startswith("["):
        return token
    inside = re.sub(r"0-9|\\d|\\x..", "", token)
    if not re.search(r"\d", inside):
        return token
    return "." if token.startswith("[^") else rf"{token[:-1]}\d]"


@dataclass(frozen=True, slots=True)
class Need:
    """Words that a line must hold for a pattern to match it."""

    parts: tuple["Need | str", ...]
    is_any: bool
    """Whether one of them is enough."""

    def rarest(self) -> tuple[str, ...]:
        """Words of which every matching line holds one: of those sets the one of longest words."""
        sets = [(part,) if isinstance(part, str) else part.rarest() for part in self.parts]
        if self.is_any:
            return tuple(word for words in sets for word in words) if all(sets) else ()
        return max(sets, key=lambda words: min(map(len, words), default=0), default=())


@cache
def need_of(number: int) -> Need:
    """What a pattern needs, in small letters and with each digit as 0.

    Raises:
        ValueError: A line can match without any.
    """
    pattern = all_patterns()[number].text
    need = _need(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
    if min(map(len, need.rarest()), default=0) < 4:
        raise ValueError(f"no text of four letters is needed by {pattern.pattern}")
    return need


def _need(tree: Any) -> Need:
    parts: list[Need | str] = []
    run = ""
    for operation, argument in [*tree, ("END", None)]:
        name = str(operation)
        letter = _one_letter(name, argument)
        run += letter
        if letter and name != "MAX_REPEAT":
            continue
        if run:
            parts.append(run)
        run = letter
        if name == "SUBPATTERN":
            parts.append(_need(argument[-1]))
        elif name == "BRANCH":
            parts.append(Need(tuple(_need(branch) for branch in argument[1]), is_any=True))
        elif name == "MAX_REPEAT" and argument[0] > 0:
            parts.append(_need(argument[2]))
    return Need(tuple(parts), is_any=False)


def _one_letter(name: str, argument: Any) -> str:
    """The letter that stands here in small, 0 for a digit; of a repetition, the one at its ends."""
    if name == "LITERAL":
        return "0" if chr(argument).isdigit() else chr(argument).lower()
    if name == "IN":
        letters = {
            _one_letter(str(kind), code) if str(kind) == "LITERAL" else str(code)
            for kind, code in argument
        }
        letter = letters.pop()
        return "" if letters else "0" if letter == "CATEGORY_DIGIT" else letter[: len(letter) == 1]
    if name == "MAX_REPEAT" and argument[0] > 0 and len(argument[2]) == 1:
        [(inner, code)] = argument[2]
        return _one_letter(str(inner), code) if str(inner) in {"LITERAL", "IN"} else ""
    return ""

"""The catalog's expressions, and those of our own readers, as one matcher over blocks of bytes.

With Hyperscan every expression is looked for in one pass; without it each is looked for by a word
that its lines must hold, which is many times slower. What either finds is a line worth reading:
the expression itself is then tried on that line.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any

from paceline.catalog.failure import load_benign_lines, load_failures
from paceline.check.diagnose.gpus import OF_RANK


class Kind(StrEnum):
    """What a pattern's line is for."""

    LOG = "log"
    """A failure of the catalog."""

    WEAK = "weak"
    """Perhaps a failure of the catalog."""

    READER = "reader"
    """Something that one of our readers takes apart: tracebacks, exit codes, NCCL's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One expression and what it is of."""

    name: str
    kind: Kind
    text: re.Pattern[str]


READERS: Mapping[str, str] = {
    "traceback": r"Traceback \(most recent call last\)",
    "exit-table": r"Root Cause \(first observed failure\)|ChildFailedError",
    "exit": r"(?i)(exit|error|return|termination)[ _-]?(code|status|value)"
    r"|\bexit(s|ed|ing)? (with |on |due to )?-?\d+\b|Error 1\d\d\b"
    r"|task[s]? [\d,-]+: (Exited with exit code|Killed|Out Of Memory|Segmentation|Bus error"
    r"|Aborted|Terminated|Floating)|\bsignal:? ?\(?(\d+|SIG[A-Z]+|Killed|Segm|Abort)|Signals\.SIG"
    r"|noticed that process rank \d+",
    "nccl-info": r"NCCL INFO .*(Using (network|non-device)|NET/|Channel \d+(/\d+)? :|Connected all"
    r"|comm 0x|NVLS|Bootstrap|NCCL_\w+ set|P2P|cudaDriverVersion|nRanks|coll channels)"
    r"|NCCL version \d",
    "watchdog": r"last enqueued(?: NCCL)? work:|[Cc]aught collective operation|Timeout at NCCL work"
    r"|Heartbeat monitor timed out",
    "ray-rank": r"world_rank=\d+, local_rank=\d+",
    "gpu-of-rank": OF_RANK,
    "dumped-stack": r"Thread 0x[0-9a-f]+ .*most recent call first|^Thread \d+ \(|^Process \d+: ",
    "error-line": r"(?i)\b(errors?|fatal|exception|abort(ed|ing)?|killed|segmentation fault|panic"
    r"|core dumped|failed|failure|timed out|refused|unreachable|no space left|NCCL WARN|no route"
    r"|command not found|was unable to)\b"
    r"|[a-z](Error|Exception)\b",
}
"""Reader -> the lines it wants. `error-line` is for logs whose failure nobody knows yet."""


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
        for name, text in READERS.items()
    ]
    return tuple(found)


@cache
def benign() -> re.Pattern[str]:
    """A line that looks like an error and is none."""
    texts = [f"(?:{text})" for line in load_benign_lines() for text in line.log]
    return re.compile("|".join(texts), re.IGNORECASE)


Find = Callable[[bytes], Sequence[tuple[int, int]]]
"""Block -> (offset in a line, pattern's number) of every line worth reading; in any order."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Looks for patterns in blocks of whole lines."""

    find: Find
    how: str


def make_matcher(numbers: Iterable[int], *, hyperscan: bool = True) -> Matcher:
    """A matcher of those patterns, by their numbers in `all_patterns`."""
    return _made(tuple(numbers), hyperscan)


@lru_cache(maxsize=4)  # to compile all patterns takes longer than to read a short log
def _made(wanted: tuple[int, ...], hyperscan: bool) -> Matcher:
    if hyperscan:
        try:
            import hyperscan as engine
        except ImportError:
            return Matcher(_by_words(wanted), "re")
        return Matcher(_by_hyperscan(engine, wanted), "hyperscan")
    return Matcher(_by_words(wanted), "re")


def _by_hyperscan(engine: Any, numbers: Sequence[int]) -> Find:
    if not numbers:
        return lambda block: ()
    patterns = all_patterns()
    plain = engine.HS_FLAG_MULTILINE
    database = engine.Database()
    flags = []
    texts = []
    for number in numbers:
        text = patterns[number].text.pattern.removeprefix("(?i)")
        is_caseless = patterns[number].text.flags & re.IGNORECASE
        flag = plain | (engine.HS_FLAG_CASELESS if is_caseless else 0)
        # ^ and $ are of the message, which stands behind what loggers write in front
        text = text.removeprefix("^").removesuffix("$")
        texts.append(re.sub(r"\(\?P<\w+>", "(?:", text).encode())
        flags.append(flag | (engine.HS_FLAG_PREFILTER if "(?!" in text or "(?=" in text else 0))
    database.compile(expressions=texts, ids=list(numbers), elements=len(numbers), flags=flags)

    def find(block: bytes) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        take = found.append

        def on_match(number: int, start: int, end: int, flag: int, context: object) -> None:
            take((end - 1, number))

        database.scan(block, match_event_handler=on_match)
        return found

    return find


def _by_words(numbers: Sequence[int]) -> Find:
    patterns = all_patterns()
    searches = [(number, _words(patterns[number].text)) for number in numbers]

    def find(block: bytes) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        lower: bytes | None = None
        for number, (words, caseless) in searches:
            if caseless and lower is None:
                lower = block.lower()
            text = lower if caseless and lower is not None else block
            for word in words:
                at = text.find(word)
                while at >= 0:
                    found.append((at, number))
                    end = text.find(b"\n", at)
                    at = text.find(word, end) if end >= 0 else -1
        return found

    return find


def _words(pattern: re.Pattern[str]) -> tuple[tuple[bytes, ...], bool]:
    """Texts of which every matching line holds one; whether in any case."""
    import re._parser as parser  # type: ignore[import-not-found]

    tree = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    caseless = bool(pattern.flags & re.IGNORECASE)
    words = _needed(tree)
    if words is None:
        raise ValueError(f"no text is needed by {pattern.pattern}")
    return tuple({(word.lower() if caseless else word).encode() for word in words}), caseless


def _needed(tree: Any) -> list[str] | None:
    """The longest text that is in every match, or one for each branch; None where there is none."""
    best: list[str] | None = None
    run = ""

    def better(words: list[str] | None) -> None:
        nonlocal best
        if words and min(map(len, words)) > (min(map(len, best)) if best else 0):
            best = words

    for operation, argument in tree:
        name = str(operation)
        if name == "LITERAL":
            run += chr(argument)
            continue
        better([run] if run else None)
        run = ""
        if name == "SUBPATTERN":
            better(_needed(argument[-1]))
        elif name == "BRANCH":
            each = [_needed(branch) for branch in argument[1]]
            if all(each):
                better([word for words in each if words for word in words])
        elif name == "MAX_REPEAT" and argument[0] > 0:
            better(_needed(argument[2]))
    better([run] if run else None)
    return best

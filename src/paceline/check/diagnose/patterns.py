"""The catalog's expressions, and those of our own readers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from paceline.catalog.failure import load_benign_lines, load_failures
from paceline.check.diagnose.gpus import OF_RANK


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


_ERROR_WORDS = (
    "errors?|fatal|exception|aborted|aborting|abort|killed|segmentation fault|panic|core dumped"
    "|failed|failure|timed out|refused|unreachable|no space left|NCCL WARN|no route"
    "|command not found|was unable to"
)

READERS: Mapping[str, Sequence[str]] = {
    "traceback": [r"Traceback \(most recent call last\)"],
    "exit-table": [r"Root Cause \(first observed failure\)|ChildFailedError"],
    "exit": [
        r"(?i)exit[ _-]?(code|status|value)",
        r"(?i)(error|return|termination)[ _-]?(code|status|value)",
        r"(?i)\bexit(s|ed|ing)? (with |on |due to )?-?\d+\b",
        r"Error 1\d\d\b",
        (
            r"task[s]? [\d,-]+: (Exited with exit code|Killed|Out Of Memory|Segmentation|Bus error"
            r"|Aborted|Terminated|Floating)"
        ),
        r"\bsignal:? ?\(?(\d+|SIG[A-Z]+|Killed|Segm|Abort)|Signals\.SIG",
        r"noticed that process rank \d+",
    ],
    "nccl-info": [
        (
            r"NCCL INFO .*(Using (network|non-device)|NET/|Channel \d+(/\d+)? :|Connected all"
            r"|comm \dx|NVLS|Bootstrap|NCCL_\w+ set|P\dP|cudaDriverVersion|nRanks|coll channels)"
        ),
        r"NCCL version \d",
    ],
    "watchdog": [
        (
            r"last enqueued(?: NCCL)? work:|[Cc]aught collective operation|Timeout at NCCL work"
            r"|Heartbeat monitor timed out"
        )
    ],
    "ray-rank": [r"world_rank=\d+, local_rank=\d+"],
    "gpu-of-rank": [OF_RANK],
    "dumped-stack": [r"Thread 0x[0-9a-f]+ .*most recent call first|^Thread \d+ \(|^Process \d+: "],
    "error-line": [
        *(rf"(?i)\b{words}\b" for words in _ERROR_WORDS.split("|")),
        r"(?i)[a-z](Error|Exception)\b",
    ],
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

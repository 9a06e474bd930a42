"""What a diagnosis says (JSON too): causes in order, what follows from them, what else was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from paceline.catalog.failure import Failure, load_failures
from paceline.check.finding import Evidence
from paceline.errors import JobError

MAX_SHOWN = 3
"""Causes and look-alikes that an answer names."""


class Confidence(StrEnum):
    """How surely a cause is seen."""

    CERTAIN = "certain"
    """It prints its own message."""

    LIKELY = "likely"
    """What is seen fits several causes, and a second fact speaks for this one."""

    POSSIBLE = "possible"
    """What is seen fits, and nothing speaks against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One failure of the catalog that explains what is seen."""

    id: str
    confidence: Confidence
    what: str
    title: str
    """The failure's, or what is seen of it where that would say more."""

    rank: int | None = None
    """The first rank that shows it."""

    host: str | None = None
    ranks: Sequence[int] = ()
    """All ranks that do."""

    count: int = 1
    evidence: Sequence[Evidence] = ()
    place: str | None = None
    """File and line of the reader's program, where a traceback says it."""

    check: str | None = None
    """What the reader does to decide whether it is this cause."""

    fix: str | None = None
    """What is known of this run's own fix; the catalog's otherwise."""

    @property
    def failure(self) -> Failure:
        """Its text in the catalog."""
        return load_failures()[self.id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """A failure that follows from another."""

    id: str
    count: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance:
    """A failure whose words are like those of a line that nothing knows. It need not be it."""

    id: str
    evidence: Evidence
    covered: float
    """Share of the line's words, by weight, that the failure's texts hold: 0 to 1."""

    @property
    def failure(self) -> Failure:
        """Its text in the catalog."""
        return load_failures()[self.id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the logs say."""

    causes: Sequence[Cause]
    """The root cause first; empty where nothing is known."""

    consequences: Sequence[Consequence] = ()
    notes: Sequence[str] = ()
    """What else is worth a word: slow settings, what the launcher says and is wrong."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """What the run used: network, versions, transports; in words."""

    nccl: Mapping[str, Any] | None = None
    """What NCCL's log says of the network, field by field: `facts` has it in words."""

    unknown: Sequence[Evidence] = ()
    """Lines that may matter, where no cause is known."""

    resembling: Sequence[Resemblance] = ()
    """Where no cause is known: failures whose words are like those of these lines. Unsure."""

    num_ranks: int | None = None
    """The highest rank that writes in the logs, plus one."""

    only_rank: int | None = None
    """The rank that writes in the log, where there is one log and no other rank does."""

    num_bytes: int = 0
    num_lines: int = 0
    num_sources: int = 0
    has_failed: bool = False
    """Whether anything in the logs says that the run failed."""

    open_end: str | None = None
    """Where training stopped, where nothing shows a failure that ended the run, or its end."""

    saturated: Sequence[str] = ()
    is_words: bool = False
    """Whether a person's words are all that was given, and no log."""

    troubles: Sequence[str] = ()
    """Sources that could not be read, and why."""

    @property
    def is_concluded(self) -> bool:
        """A cause is known, or nothing is wrong. Words are no proof that nothing is, and logs of a
        run whose end is not in them are none."""
        return bool(self.causes) or not (self.has_failed or self.is_words or self.open_end)


def check_read(diagnosis: Diagnosis, names: Sequence[str]) -> None:
    """
    Raises:
        JobError: `V011`, nothing was read of what these names mean.
    """
    nothing_read = diagnosis.num_sources and len(diagnosis.troubles) == diagnosis.num_sources
    says_something = diagnosis.causes or diagnosis.num_lines or not nothing_read
    if diagnosis.num_bytes and says_something:
        return
    why = diagnosis.troubles[0] if diagnosis.troubles else f"{' '.join(names)}: empty"
    raise JobError.of(
        code="V011",
        what=f"nothing was read: {why}",
        where=" ".join(names),
        fix="give a log with text in it, or whole dumps of all ranks; "
        "`... 2>&1 | paceline diagnose -` reads both outputs",
    )


def diagnosis_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """What `diagnose --json` prints."""
    data = asdict(diagnosis)
    if diagnosis.nccl is not None:
        for words in ("network", "warnings", "pairs", "unset"):
            data["facts"].pop(words, None)
        data["facts"]["nccl"] = diagnosis.nccl
    del data["nccl"]
    return data | {
        "causes": [_cause(each) for each in diagnosis.causes],
        "candidates": _candidates(diagnosis),
        "concluded": diagnosis.is_concluded,
    }


def _candidates(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What the answer names, in order, and how surely: a look-alike is unsure."""
    named = [
        {"id": each.id, "certainty": str(each.confidence), "check": each.check}
        for each in diagnosis.causes
    ]
    named += [
        {"id": each.id, "certainty": "unsure", "check": None} for each in diagnosis.resembling
    ]
    return named[:MAX_SHOWN]


def _cause(cause: Cause) -> dict[str, Any]:
    failure = cause.failure
    return asdict(cause) | {
        "effect": str(failure.effect),
        "why": failure.why,
        "fix": cause.fix or failure.fix,
        "not_to_confuse": failure.not_to_confuse,
        "published": list(failure.published),
    }

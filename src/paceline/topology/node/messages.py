"""What a node is told to do, and what it answers; see `__main__.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.topology.node.facts import NodeFacts, Peer, Question

ANSWER = "paceline-node "


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Look at this machine, and then answer the others."""

    question: Question
    word: str
    stays_s: float
    minds_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is, and where it answers."""

    facts: NodeFacts
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call everybody."""

    peers: tuple[Peer, ...]
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start some processes of a measurement and wait for them."""

    programs: Mapping[str, str]
    """Name of a file -> its text, written into a folder of their own."""

    command: Sequence[str]
    """After Python; run in that folder."""

    environments: Sequence[Mapping[str, str]]
    """Environment of each process, set over this one's."""

    limit_s: float
    minds_end: bool = False
    """Whether they end when the input does: whoever asked has gone."""

    answer: str = ""
    """File that the first one writes, whose text is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """How a measurement ended here."""

    text: str = ""
    """Text of the file that was asked for; empty where there is none."""

    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A file on its way."""

    content: bytes
    is_executable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Take these files into a folder, and list it."""

    folder: str
    names: tuple[str, ...]
    """Files that are listed whatever they are, relative to the folder."""

    files: Mapping[str, Sent] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    is_dry: bool = True
    """Nothing is sent or removed: the folder is not marked as one that was synced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What is in a folder now."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to it -> SHA-256, with `+x` behind it for a file that can be started."""

    synced: tuple[str, ...] | None = None
    """Files that earlier syncs sent or found the same; None where there was none."""

    links: tuple[str, ...] = ()
    """Links to folders: what is below them is not listed."""

    has_git: bool = False
    """Whether it is in a git repository."""

    commit: str = ""
    """Its commit; empty where there is none yet."""

    has_changes: bool = False
    """Whether git sees changes that are in no commit."""

    why_not: str | None = None

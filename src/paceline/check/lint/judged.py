"""What reading one file, or several together, gave."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.check.finding import Finding, writable
from paceline.check.lint.configs.marked import NoParser
from paceline.check.lint.suppress import Suppression


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A file that could not be read as what it is."""

    path: str
    line: int | None
    what: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", writable(self.what))

    def __str__(self) -> str:
        return f"{self.path}{f':{self.line}' if self.line else ''}: {self.what}"


@dataclass(slots=True)
class Judged:
    """Findings, and what else there is to say of the files."""

    findings: list[Finding] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    without_parser: list[Unread] = field(default_factory=list)
    answers: list[Suppression] = field(default_factory=list)
    """Comments that answer findings."""

    broken: list[str] = field(default_factory=list)
    """Programs that are none."""

    path: str = ""
    """The one file that this is of."""

    read: list[str] = field(default_factory=list)
    """The files that were read for it, its own among them."""

    def take(self, other: "Judged") -> None:
        """Add what another file gave."""
        self.findings += other.findings
        self.unread += other.unread
        self.without_parser += other.without_parser
        self.answers += other.answers
        self.broken += other.broken

    def over(self, path: str, rule: str, findings: Callable[[], Iterable[Finding]]) -> bool:
        """Add what a rule finds; whether that is anything. A rule that fails ends no other."""
        before = len(self.findings)
        try:
            self.findings += findings()
        except NoParser as error:
            self.without_parser.append(Unread(path=path, line=error.line, what=str(error)))
        except Exception as error:  # noqa: BLE001, a mistake of ours: the other rules still answer
            what = f"the rule {rule} failed with {type(error).__name__}: {error}; please report it"
            self.unread.append(Unread(path=path, line=None, what=what))
        return len(self.findings) > before

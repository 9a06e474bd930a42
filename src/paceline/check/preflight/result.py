"""What one check says of one node."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.catalog.failure import load_failures


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARNING = "warning"
    """It works, and worse than it could; or it fails under conditions that are likely."""

    FAIL = "fail"
    """The run would not start, would hang, or would end."""

    UNKNOWN = "unknown"
    """It could not be looked at; the evidence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check of one node."""

    name: str
    """Name of the check, such as `shared-memory`. `--allow` takes it."""

    node: str
    status: Status
    evidence: str
    """What was seen, in this machine's numbers."""

    fix: str = ""
    """Command or change that fixes it; empty when nothing has to change."""

    id: str | None = None
    """The catalog's failure that this would become: `paceline explain ID`."""

    unreached: tuple[str, ...] = ()
    """Every node that this one cannot reach; the evidence names the first three."""

    def __post_init__(self) -> None:
        if self.status in (Status.WARNING, Status.FAIL) and self.id not in load_failures():
            raise ValueError(f"no failure {self.id} in the catalog explains {self.name}")


def passed(name: str, node: str, evidence: str) -> Result:
    """Nothing has to change."""
    return Result(name=name, node=node, status=Status.PASS, evidence=evidence)


def unknown(name: str, node: str, why: str) -> Result:
    """It could not be looked at."""
    return Result(name=name, node=node, status=Status.UNKNOWN, evidence=why)


def warned(name: str, node: str, evidence: str, *, id: str, fix: str) -> Result:
    """It works, and something is wrong."""
    return Result(name=name, node=node, status=Status.WARNING, evidence=evidence, fix=fix, id=id)


def failed(name: str, node: str, evidence: str, *, id: str, fix: str) -> Result:
    """The run would not get through."""
    return Result(name=name, node=node, status=Status.FAIL, evidence=evidence, fix=fix, id=id)

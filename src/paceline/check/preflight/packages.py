"""Installed packages against requirements, and against what each of them requires in turn.

Leaves out reading the files (`record/requirements.py`) and what several nodes have alike
(`software.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from paceline.check.preflight.result import Result, failed, passed, unknown, warned
from paceline.record.requirements import Requirements, Wanted
from paceline.topology.node.probe_packages import Installed
from paceline.units import counted

_NAME, _ID = "packages", "requirements-not-met"


@dataclass(frozen=True, slots=True)
class Lack:
    """A requirement that what is installed does not meet."""

    wanted: Wanted
    evidence: str

    @property
    def spec(self) -> str:
        """What pip is given: the requirement without its marker, which holds here."""
        asked = self.wanted.requirement
        extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
        return f"{asked.name}{extras}" + (f" @ {asked.url}" if asked.url else str(asked.specifier))


def find_lacks(asked: Requirements, installed: Mapping[str, Installed]) -> list[Lack]:
    """Every requirement that is not met, those of the files first.

    What the files' packages require in turn is followed, with the extras that are asked for.
    Packages that no file asks for are not looked at.
    """
    found: dict[tuple[str, str], Lack] = {}
    todo = [wanted for wanted in asked.wanted if _applies(wanted.requirement, ("",))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop(0)
        name = canonicalize_name(wanted.requirement.name)
        have = installed.get(name)
        why = _why_not(wanted, have)
        if why is not None:
            lack = Lack(wanted, why)
            found.setdefault((name, str(wanted.requirement.specifier)), lack)
        elif have is not None and not wanted.is_constraint:
            extras = frozenset(canonicalize_name(each) for each in wanted.requirement.extras)
            if (name, extras) not in seen:
                seen.add((name, extras))
                todo += _in_turn(name, have, extras, wanted)
    return list(found.values())


def check_requirements(
    node: str, asked: Requirements, lacks: Sequence[Lack], fix: str
) -> Iterator[Result]:
    """One line for each requirement that is not met, and one for what was met.

    Args:
        asked: What the files ask for.
        fix: The command that installs one requirement; its words are put behind.
    """
    for where, why in asked.troubles:
        yield unknown(_NAME, node, f"{where}: {why}")
    for lack in lacks:
        make = failed if lack.wanted.is_needed else warned
        yield make(_NAME, node, lack.evidence, id=_ID, fix=f"{fix} '{lack.spec}'")
    direct = [wanted for wanted in asked.wanted if not wanted.is_constraint]
    if direct and not lacks:
        files = ", ".join(asked.files)
        said = f"{counted(len(direct), 'requirement')} of {files} and what they need: all there"
        yield passed(_NAME, node, said)
    elif not asked.files and not asked.troubles:
        yield passed(_NAME, node, "no requirements*.txt and no pyproject.toml here to compare with")


def _why_not(wanted: Wanted, have: Installed | None) -> str | None:
    asked = wanted.requirement
    if have is None:
        if wanted.is_constraint:
            return None
        return f"{asked.name} is not installed; {wanted.where} asks for {_words(asked)}"
    try:
        fits = asked.specifier.contains(Version(have.version), prereleases=True)
    except InvalidVersion:  # nothing can be compared with it
        fits = not asked.specifier
    if not fits:
        return f"{asked.name} {have.version} is installed; {wanted.where} asks for {_words(asked)}"
    return None


def _words(asked: Requirement) -> str:
    extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
    return f"{asked.name}{extras}{asked.specifier}"


def _in_turn(
    name: str, have: Installed, extras: frozenset[str], wanted: Wanted
) -> Iterator[Wanted]:
    """What an installed package requires, for these extras."""
    for text in have.requires:
        try:
            needed = Requirement(text)
        except InvalidRequirement:  # of an old package: pip passes it over too
            continue
        if _applies(needed, ("", *extras)):
            yield Wanted(needed, f"{name} {have.version}", wanted.is_needed)


def _applies(asked: Requirement, extras: Sequence[str]) -> bool:
    marker = asked.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)

"""The engine that a job names, and its version: from `engines.toml`.

Leaves out: what an engine keeps in memory (`catalog/engines.toml`), and how it splits work
(`parallel/abilities.py`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from packaging.version import InvalidVersion, Version

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job.section import shipped


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNames:
    """How one engine is named. Fields are explained at the top of `engines.toml`."""

    names: tuple[str, ...]
    source: str
    like: tuple[str, ...] = ()
    read: tuple[str, str] | None = None
    planned: str = ""
    files: tuple[str, str] | None = None
    instead: str = ""
    is_megatron: bool = False


ENGINE_NAMES: Mapping[str, EngineNames] = msgspec.convert(
    shipped("engines.toml"), dict[str, EngineNames]
)
"""Engine of the catalog -> how a job names it."""

_VERSION = re.compile(r"(?P<name>.*?)[ =@]*[ =@-](?:core[_-])?[vr]?(?P<version>\d\S*)")


def read_engine(written: str, *, version: str = "", where: str) -> tuple[str, str]:
    """The engine of a job, and the release that it asks for; empty where it names none.

    Args:
        written: Name or other spelling, with or without a version behind it.
        version: What the job says apart.
        where: Its place in the job.

    Raises:
        JobError: `J026`, there is no such engine, or its facts were not read from that release.

    >>> read_engine("Megatron-LM core_r0.16.0", where="")
    ('megatron', '0.16.0')
    >>> read_engine("torchtitan==0.2.2", where=""), read_engine("fsdp2", where="")
    (('torchtitan', '0.2.2'), ('paceline', ''))
    """
    wanted = " ".join(written.split()).lower()
    spelled, behind = wanted, ""
    if wanted not in _SPELLINGS and (match := _VERSION.fullmatch(wanted)) is not None:
        spelled, behind = match["name"].strip(), match["version"]
    name = _SPELLINGS.get(spelled)
    if name is None:
        raise JobError(_no_such_engine(written, spelled, where))
    stated = behind or re.sub(r"^(core[_-])?[vr]", "", version.strip().lower())
    JobError.raise_for(_check_version(name, spelled, stated, where))
    if behind and version and Version(behind) != Version(version):
        raise JobError.of(
            code="J026",
            what=f"engine is {written}, and engine_version {version}",
            where=where,
            fix="give the version once",
        )
    return name, stated


def version_text(value: object) -> object:
    """A version as a job file gives it; a number has lost its last zeros, 0.10 for one.

    Raises:
        ValueError: It is a number.
    """
    if isinstance(value, float | int) and not isinstance(value, bool):
        raise ValueError("a version is text, with its last zeros")
    return value


_SPELLINGS: Mapping[str, str] = {
    spelling: name
    for name, row in ENGINE_NAMES.items()
    for spelling in (name, *row.names, *row.like)
}


def _no_such_engine(written: str, spelled: str, where: str) -> Problem:
    near = did_you_mean(spelled, ENGINE_NAMES, cutoff=0.4)
    return Problem(
        code="J026",
        what=f"there is no engine `{written}`",
        where=where,
        fix=f"{near} Known are {', '.join(ENGINE_NAMES)}".lstrip(),
    )


def _check_version(name: str, spelled: str, version: str, where: str) -> Iterator[Problem]:
    row = ENGINE_NAMES[name]
    if version and (why := _why_not(name, spelled, version)):
        fix = f"leave the version out: `engine: {name}`"
        if row.read is not None:
            fix += f" plans for {row.planned}; or name one from {row.read[0]} to {row.read[1]}"
        yield Problem(code="J026", what=why, where=where, fix=fix)


def _why_not(name: str, spelled: str, version: str) -> str:
    """Why a release cannot be planned for; empty where it can."""
    row = ENGINE_NAMES[name]
    if spelled in row.like:
        return f"{version} is a version of {spelled}, which is planned as {name} is"
    if name == "paceline":
        return f"Paceline's own runtime is the one that is installed, and has no version {version}"
    if row.read is None:
        return f"nobody noted which release of {name} its facts are of: {version} may be another"
    first, last = row.read
    try:
        given = _release(version)
    except InvalidVersion:
        return f"`{version}` is no version of {name}"
    may = "what it keeps in memory and what it hides may differ"
    is_series = len(Version(version).release) < 3  # `0.2` is any of its releases
    if (is_series and given[:2] < series(first)) or (not is_series and given < _release(first)):
        return f"{name} {version} is older than {first}, the first with known facts: {may}"
    if series(version) > series(last):
        return f"{name} {version} is newer than {last}, the last with known facts: {may}"
    return ""


def _release(version: str) -> tuple[int, int, int]:
    found = Version(version)
    return found.major, found.minor, found.micro


def series(version: str) -> tuple[int, int]:
    """What releases that differ in repairs alone have in common.

    >>> series("0.3.2"), series("1.15")
    ((0, 3), (1, 15))
    """
    return _release(version)[:2]


def is_before(version: str, other: str) -> bool:
    """Whether a release is older; one in preparation counts as that release."""
    return _release(version) < _release(other)


def is_newer_patch(name: str, version: str) -> bool:
    """Whether a release is of the last series that was read, and newer than what was read."""
    read = ENGINE_NAMES[name].read
    return bool(version) and read is not None and is_before(read[1], version)


def has_files(name: str, version: str) -> bool:
    """Whether `paceline render` writes files for a release of an engine; empty is the planned one.

    >>> has_files("torchtitan", ""), has_files("torchtitan", "0.2.2"), has_files("maxtext", "")
    (True, False, False)
    """
    files = ENGINE_NAMES[name].files
    if files is None or not version:
        return files is not None
    return not is_before(version, files[0]) and series(version) <= series(files[1])


def written_for(name: str) -> str:
    """The releases that an engine's files are written for; empty where it has none.

    >>> written_for("deepspeed"), written_for("torchtitan"), written_for("maxtext")
    ('deepspeed 0.16.0 to 0.19.8', 'torchtitan 0.3.0', '')
    """
    row = ENGINE_NAMES.get(name)
    if row is None or row.files is None:
        return ""
    package = "accelerate" if name == "fsdp1" else name
    return f"{package} {' to '.join(dict.fromkeys(row.files))}"


def tag(version: str) -> str:
    """A release with all three numbers, as tags have it.

    >>> tag("0.14")
    '0.14.0'
    """
    return ".".join(map(str, _release(version)))

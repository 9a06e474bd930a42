"""Requirements that a project asks for: requirements files with what they include, pyproject.toml.

Leaves out what is installed (`topology/node/probe_packages.py`) and whether it is enough
(`check/preflight/packages.py`).
"""

import codecs
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_INDEX = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--pre", "--no-index")
"""Options of a requirements file that decide where pip looks; they go into the command that
installs. Source: pip's documentation, requirements file format."""

_NO_VALUE = ("--pre", "--no-index")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One requirement and the line that has it."""

    requirement: Requirement
    where: str
    """`requirements.txt:3`, or `pyproject.toml [train]`."""

    is_needed: bool = True
    """Whether its absence is a fault; not so in a file that was only found, as
    `requirements-tpu.txt`."""

    is_constraint: bool = False
    """From a `-c` file: judged only where the package is installed or asked for elsewhere."""


@dataclass(slots=True)
class Requirements:
    """What was read, and what could not be."""

    files: list[str] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    """Words for pip: `--extra-index-url URL`."""

    python: str | None = None
    """`requires-python` of pyproject.toml."""

    troubles: list[tuple[str, str]] = field(default_factory=list)
    """Place, and why it was not read or cannot be checked."""


def find_requirements(folder: Path) -> list[Path]:
    """The files of a folder that say what its programs need."""
    found = sorted(path for path in folder.glob("requirements*.txt") if path.is_file())
    pyproject = folder / "pyproject.toml"
    return [*found, *([pyproject] if pyproject.is_file() else [])]


def read_requirements(
    paths: Sequence[Path], *, extras: Sequence[str] = (), named: bool = True
) -> Requirements:
    """Every requirement of these files and of the files that they include.

    Args:
        extras: Of `[project.optional-dependencies]` that count too.
        named: Whether the reader named them. Of files that were found, requirements.txt and
            pyproject.toml are needed, and the others may be for another machine.
    """
    made = Requirements()
    for path in paths:
        if path.name == "pyproject.toml":
            _read_project(path, made, extras)
        else:
            needed = named or path.name == "requirements.txt"
            _read_file(path, path.parent, made, needed=needed, constraint=False, seen=set())
    known = {name for wanted in made.wanted for name in (wanted.where.partition("[")[2][:-1],)}
    for extra in extras:
        if extra not in known and not any(where == extra for where, _ in made.troubles):
            made.troubles.append((f"--extra {extra}", "no pyproject.toml that was read has it"))
    return made


def _read_file(
    path: Path, top: Path, made: Requirements, *, needed: bool, constraint: bool, seen: set[Path]
) -> None:
    name = str(path.relative_to(top) if path.is_relative_to(top) else path)
    if path.resolve() in seen:  # a file that includes itself
        return
    seen.add(path.resolve())
    try:
        data = path.read_bytes()
        # As `pip freeze >` leaves it in PowerShell.
        is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        made.troubles.append((name, (why or str(error)).lower()))
        return
    made.files.append(name)
    for line, words in _lines(text):
        where = f"{name}:{line}"
        option = re.match(r"(-[a-z]|--[a-z-]+)(?:\s*=\s*|\s+|(?<=^-[rc])|$)(.*)", words)
        if option is None:
            _add(words, where, made, needed=needed, constraint=constraint)
        elif option[1] in ("-r", "--requirement", "-c", "--constraint"):
            is_constraint = constraint or option[1] in ("-c", "--constraint")
            inner = path.parent / option[2].strip("\"'")
            _read_file(inner, top, made, needed=needed, constraint=is_constraint, seen=seen)
        elif option[1] in ("-e", "--editable"):
            _add(option[2], where, made, needed=needed, constraint=constraint)
        elif option[1] in _INDEX:
            made.options += [option[1], *([] if option[1] in _NO_VALUE else [option[2]])]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    number, kept, first = 0, "", 1
    for number, line in enumerate(text.splitlines(), 1):
        first = first if kept else number
        if line.endswith("\\"):
            kept += line[:-1]
            continue
        words = re.sub(r"(^|\s)#.*", "", kept + line)
        words = re.split(r"\s--(?:hash|config-settings|global-option)\b", words)[0].strip()
        kept = ""
        if words:
            yield first, words
    if kept.strip():
        yield first, kept.strip()


def _add(words: str, where: str, made: Requirements, *, needed: bool, constraint: bool) -> None:
    egg = re.search(r"#(?:.*&)?egg=([\w.-]+)", words)
    if egg and "@" not in words.split("://")[0]:
        words = egg[1]  # git+https://...#egg=name: any version that is there
    try:
        made.wanted.append(Wanted(Requirement(words), where, needed, constraint))
    except InvalidRequirement as error:
        if re.match(r"[\w+]+://|[.~/]|[\w.-]+[/\\]|.*\.(whl|zip|tar\.gz)$", words):
            words = without_secrets(words)
            why = f"{words} is a path or an address without a name, so it cannot be looked up"
        else:
            why = f"{words!r} is no requirement: {str(error).splitlines()[0]}"
        made.troubles.append((where, why))


def _read_project(path: Path, made: Requirements, extras: Sequence[str]) -> None:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        made.troubles.append((path.name, (why or str(error)).lower()))
        return
    project = data.get("project")
    if not isinstance(project, dict):
        tool = data.get("tool")
        if isinstance(tool, dict) and "poetry" in tool:
            why = "its packages are in Poetry's own table; poetry export -f requirements.txt"
            made.troubles.append((path.name, f"{why} writes them as a file that is read"))
        return
    made.files.append(path.name)
    asked = project.get("requires-python")
    made.python = asked if isinstance(asked, str) else None
    _add_each(project.get("dependencies", []), path.name, project, made, set())
    for extra in extras:
        if extra in _groups(project):
            where = f"{path.name} [{extra}]"
            _add_each(_groups(project)[extra], where, project, made, {extra})


def _groups(project: dict[str, Any]) -> dict[str, Any]:
    found = project.get("optional-dependencies")
    return found if isinstance(found, dict) else {}


def _add_each(
    group: Any, where: str, project: dict[str, Any], made: Requirements, seen: set[str]
) -> None:
    """A group's requirements; `name[extra]` of the project itself stands for that extra's."""
    if not isinstance(group, list):
        made.troubles.append((where, f"its dependencies are {group!r}, and have to be a list"))
        return
    own = canonicalize_name(str(project.get("name", "")))
    for words in group:
        before = len(made.wanted)
        _add(str(words), where, made, needed=True, constraint=False)
        if len(made.wanted) > before and canonicalize_name(made.wanted[-1].requirement.name) == own:
            for extra in made.wanted.pop().requirement.extras - seen:
                _add_each(_groups(project).get(extra, []), where, project, made, seen | {extra})


def without_secrets(words: str) -> str:
    """The words, without the user and the password that an address in them may hold.

    >>> without_secrets("--index-url https://me:token@host/simple")
    '--index-url https://***@host/simple'
    """
    return re.sub(r"://[^/@\s]+@", "://***@", words)

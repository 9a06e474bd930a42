"""The text of a job file, or of another file with its keys, as values and the line of each key."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from paceline.errors import JobError, Problem, nearest

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Place = tuple[str | int, ...]
"""Keys, and places in lists, from the top."""

Where = Callable[[Place], str]
_DEEPEST, _MOST_KEYS = 20, 10_000
"""Far above any job; a YAML alias to itself, or to many aliases, would never end."""


class Given(str):
    """`key.key=value` that an option of its own gave, named in messages instead of `--set`."""

    option = "--set"

    def __new__(cls, option: str, assignment: str) -> Self:
        """The assignment of an option: `Given("--deadline", "plan.deadline=3d")`."""
        given = super().__new__(cls, assignment)
        given.option = option
        return given


class _Overridden(int):
    """The line, 0, of a key that the command line gave."""

    option = "--set"
    assignment = ""
    """As it was given: `train.global_batch=64`."""


def read_text(path: Path) -> str:
    """What is in the file.

    Raises:
        JobError: `J001`, it is not there, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = {each.stem: each for each in sorted(path.parent.glob("*.y*ml"))}
        near = [there[stem] for stem in nearest(path.stem, there)]
        fix = f"did you mean {near[0]}?" if near else "write one: paceline init job.yaml"
        what = f"there is no file {path}"
        raise JobError.of(code="J001", what=what, where=str(path), fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError.of(
            code="J001",
            what=f"{path} cannot be read: {reason}",
            where=str(path),
            fix="give the path of a readable YAML file",
        ) from None


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """Keys and values of a YAML text, and the line of each.

    Raises:
        JobError: `J002`, it is no YAML, or has a key twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        repeated = list(_walk(node, (), lines))
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fix = "correct the line; keys need a space after the colon, and spaces (no tabs) before"
        if mark and opened and opened.line != mark.line:
            context = getattr(error, "context", None) or "what is open there"
            line += f" ({context}, begun on line {opened.line + 1})"
            if (bracket := text[opened.index : opened.index + 1]) in ("{", "["):
                fix = f"close the {bracket} that line {opened.line + 1} opens"
        raise JobError.of(
            code="J002",
            what=f"not YAML: {getattr(error, 'problem', None) or error}",
            where=f"{source}{line}",
            fix=fix,
        ) from None
    if repeated:
        raise JobError(
            *(
                Problem(
                    code="J002",
                    what=f"`{dotted(path)}` is written twice, on line {first} and line {again}",
                    where=f"{source} line {again}",
                    fix="keep one of them",
                )
                for path, first, again in repeated
            )
        )
    if not isinstance(values, dict):
        raise JobError.of(
            code="J002",
            what=f"a job is keys and values, this is a {type(values).__name__}",
            where=source,
            fix="start from `paceline init job.yaml`",
        )
    return values, lines


def _walk(node: Any, path: Place, lines: dict[Place, int]) -> Iterator[tuple[Place, int, int]]:
    """Note the line of every key, and yield the keys written twice."""
    if len(path) > _DEEPEST or len(lines) > _MOST_KEYS:
        problem = "this goes deeper, or has more keys, than a job can: an alias to itself?"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a word", problem_mark=key.start_mark)
            inner = (*path, key.value)
            if inner in lines:
                yield inner, lines[inner], line
            lines[inner] = line
            yield from _walk(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            yield from _walk(item, (*path, index), lines)


def where_in(lines: Mapping[Place, int], source: str, *before: str) -> Where:
    """What names the place of a key below `before`: `alerts.rules[0].to, job.yaml line 7`."""

    def where(path: Place) -> str:
        whole = (*before, *path)
        line = next(
            (lines[whole[:end]] for end in range(len(whole), 0, -1) if whole[:end] in lines), None
        )
        place = source if line is None else f"{source} line {line}"
        if line == 0:
            place = getattr(line, "option", "--set")
        return f"{dotted(whole) or 'the whole file'}, {place}"

    return where


def override(values: dict[str, Any], lines: dict[Place, int], assignment: str) -> None:
    """Put `key.key=value` over what a file has; its line is 0.

    Raises:
        JobError: `J003`, it is no assignment.
    """
    key, equals, text = assignment.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise JobError.of(
            code="J003",
            what=f"{str(assignment)!r} is not an override",
            where=getattr(assignment, "option", "--set"),
            fix="write it like --set train.global_batch=64",
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        value = text
    inner: dict[str, Any] = values
    for name in keys[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[keys[-1]] = value
    for known in [path for path in lines if path[: len(keys)] == keys]:
        del lines[known]
    lines[keys] = line = _Overridden()
    line.option = getattr(assignment, "option", "--set")
    line.assignment = str(assignment)
    # A section that only --set has is of --set, too.
    for end in range(1, len(keys)):
        lines.setdefault(keys[:end], line)


def overrides_in(lines: Mapping[Place, int]) -> list[str]:
    """What `--set`, or an option in its place, gave: each assignment once, in its order."""
    given = (line.assignment for line in lines.values() if isinstance(line, _Overridden))
    return list(dict.fromkeys(given))


def dotted(path: Place) -> str:
    """A path as messages have it: `alerts.rules[0].to`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text

"""What pydantic finds wrong with a file's values, in the reader's words."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job.section import section_in
from paceline.job.yaml_text import Place, dotted, where_in

_T = TypeVar("_T")


def read_as(kind: type[_T], values: dict[str, Any], lines: Mapping[Place, int], source: str) -> _T:
    """Values as a section of a file.

    Args:
        kind: A dataclass that is a `section`, or another that pydantic reads.
        lines: Of each key, as far as they are known.
        source: Names the file.

    Raises:
        JobError: `J004` to `J006`, every problem at once.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise JobError(*_problems_in(error, values, lines, source, kind)) from None


def _problems_in(
    error: ValidationError,
    values: dict[str, Any],
    lines: Mapping[Place, int],
    source: str,
    root: Any,
) -> list[Problem]:
    """Pydantic's findings, one for each field; `root` has the known keys and their help."""
    found: dict[Place, Problem] = {}
    where_is = where_in(lines, source)
    for detail in error.errors(include_url=False):
        path, field_path = _file_path(tuple(detail["loc"]), values)
        problem = _problem(detail, path, where_is(path), root)
        if path in found and field_path:  # the other side of a union: keep the more telling one
            continue
        found[path] = problem
    for path in [*found]:
        if found[path].code == "J005" and _is_misspelled(path, found):
            del found[path]
    return sorted(found.values(), key=lambda p: _line_of(p.where))


def _is_misspelled(missing: Place, found: Mapping[Place, Problem]) -> bool:
    """Whether an unknown key of the same section is taken for the missing one: one error tells."""
    return any(
        problem.code == "J004"
        and path[:-1] == missing[:-1]
        and problem.fix == did_you_mean(str(path[-1]), [str(missing[-1])])
        for path, problem in found.items()
    )


def _line_of(where: str) -> int:
    tail = where.rpartition(" line ")[2]
    return int(tail) if tail.isdigit() else 0


def _file_path(loc: tuple[Any, ...], values: Any) -> tuple[Place, bool]:
    """The part of pydantic's location that is in the file, without its names of union members."""
    path: list[str | int] = []
    here: Any = values
    for index, part in enumerate(loc):
        if isinstance(here, dict) and isinstance(part, str):
            known = part in here
            if not known and index < len(loc) - 1:
                return tuple(path), True
            path.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            path.append(part)
            here = here[part] if part < len(here) else None
        else:
            return tuple(path), True
    return tuple(path), False


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
}
"""pydantic's name of a type -> ours."""


def _problem(detail: Any, path: Place, where: str, root: Any) -> Problem:
    kind, value = detail["type"], detail["input"]
    name = str(path[-1]) if path else ""
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(name, path[:-1], where, root)
    if kind in ("missing", "missing_argument"):
        return Problem(
            code="J005",
            what=f"`{dotted(path)}` is missing",
            where=where,
            fix=_how_to_add(path, root),
        )
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    message = message.replace("input should be", "it has to be", 1)
    of, _, how = kind.partition("_")
    if how in ("type", "parsing", "from_float") and of in _TYPES:
        message = f"not {_TYPES[of]}"
    if is_section := kind in ("dataclass_type", "dataclass_exact_type", "dict_type"):
        message = "this is a section with keys of its own"
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    fix = _wanted_at(path, root) or _help_of(path, root) or "see `paceline schema`"
    if is_section and dotted(path) in _SHORTEST:
        fix = f"for example `{dotted(path)}: {_SHORTEST[dotted(path)]}`"
    elif kind == "string_type" and isinstance(value, bool):
        fix += "; on, off, yes and no are true and false in YAML unless they are in quotes"
    elif isinstance(value, str) and fix == "write a list of text":
        words = yaml.safe_dump(value.replace(",", " ").split(), default_flow_style=True, width=999)
        fix += f": `{name}: {words.strip()}`"
    elif isinstance(value, int | float) and fix.startswith("write text"):
        name, is_set = dotted(path), where.endswith("--set")
        fix += "; in quotes a number is text: " + (
            f"--set '{name}=\"{value}\"'" if is_set else f'{name}: "{value}"'
        )
    return Problem(
        code="J006",
        what=f"`{dotted(path)}` is {shown}: {message}" if path else message,
        where=where,
        fix=fix,
    )


_SHORTEST = {"model": "{preset: llama-3-8b}", "train": "{global_batch: 128, steps: 1000}"}
"""Section that a job needs -> the least that can be written there."""


def _how_to_add(path: Place, root: Any) -> str:
    """What a missing key holds, and how to write it."""
    if dotted(path) in _SHORTEST:
        return f"add `{dotted(path)}: {_SHORTEST[dotted(path)]}`"
    meaning = (_help_of(path, root) or "it has no default").removesuffix(".")
    write = _wanted_at(path, root)
    return f"add it ({meaning[:1].lower()}{meaning[1:]})" + (f": {write}" if write else "")


def _wanted_at(path: Place, root: Any) -> str | None:
    """How to write the value at a path; of a list's item, how to write the list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    section = _section_at(path[:-1], root) if path else None
    found = [field for field in fields(section) if field.name == path[-1]] if section else []
    return wanted(found[0].type) if found else None


_MEANT = {
    "checkpoint.path": "copy_to",
    "checkpoint.dir": "copy_to",
    "checkpoint.interval": "every",
    "cluster.gpus_per_node": "per_node",
    "cluster.gpu": "accelerator",
}
"""Key by another name, which no spelling finds -> the key of the same section that is meant."""

_WHOLE = {
    "JobSpec": "a job",
    "ScriptSpec": "a job",
    "AlertsSpec": "a file of alerts",
    "FailuresSpec": "a failure process",
}
"""Section that a whole text is -> what a reader calls it."""


def _unknown_key(name: str, parent: Place, where: str, root: Any) -> Problem:
    section = _section_at(parent, root)
    known = [field.name for field in fields(section)] if section is not None else []
    whole = _WHOLE.get(root.__name__, "the contract")
    inside = f"section `{dotted(parent)}`" if parent else whole
    elsewhere = [path for path in all_fields(root) if path[-1] == name]
    # A key of another section is a better guess than one that is merely spelled a little alike.
    meant = _MEANT.get(dotted((*parent, name)), name)
    fix = did_you_mean(meant, known, cutoff=0.8 if elsewhere else 0.6)
    if not fix and elsewhere:
        section = dotted(elsewhere[0][:-1])
        fix = f"it belongs under `{section}`" if section else "it belongs at the top level"
    fix = fix or f"known keys are {', '.join(known)}"
    return Problem(code="J004", what=f"{inside} has no key `{name}`", where=where, fix=fix)


def all_fields(section: Any, path: Place = ()) -> Iterator[Place]:
    """The path of every key, sections before what is in them."""
    for field in fields(section):
        yield (*path, field.name)
        inner = section_in(field.type)
        if inner is not None:
            yield from all_fields(inner, (*path, field.name))


def _section_at(path: Place, root: Any) -> Any:
    section: Any = root
    is_key = False  # of a mapping, whose keys are the reader's own
    for part in path:
        if is_key or isinstance(part, int):
            is_key = False
            continue
        by_name = {field.name: field for field in fields(section)}
        if part not in by_name:
            return None
        annotation = by_name[part].type
        while get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        is_key = get_origin(annotation) is dict
        section = _section_of(annotation)
        if section is None:
            return None
    return section


def _section_of(annotation: Any) -> Any:
    """The section that a field of this type holds, or that each item of its list is, or None."""
    inner = (_section_of(each) for each in get_args(annotation))
    return section_in(annotation) or next(filter(None, inner), None)


def _help_of(path: Place, root: Any) -> str | None:
    """The text under the field, on one line."""
    section = _section_at(path[:-1], root) if path else None
    if section is None:
        return None
    info = cast(Any, section).__pydantic_fields__.get(path[-1])
    return " ".join(info.description.split()) if info is not None and info.description else None


_BOUNDS = (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "of at most"))
_PLAIN = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
}


def wanted(annotation: Any) -> str | None:
    """How to write a value of this type, as a sentence's end; None when there is no short way.

    >>> wanted(Annotated[int, "anything"] | Literal["auto"])
    "write a whole number, or 'auto'"
    >>> wanted(Literal["fp32", "bf16"])
    "choose one of 'fp32', 'bf16'"
    """
    section = section_in(annotation)
    if section is not None:
        return f"write keys below it: {', '.join(field.name for field in fields(section))}"
    members = _members(annotation)
    if all(get_origin(member) is Literal for member in members):
        choices = [repr(choice) for member in members for choice in get_args(member)]
        return f"choose one of {', '.join(choices)}" if len(choices) > 1 else f"write {choices[0]}"
    words = [word for member in members for word in _words(member)]
    return f"write {', or '.join(words)}" if words else None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _words(member: Any) -> Iterator[str]:
    origin = get_origin(member)
    if origin is Literal:
        yield from (repr(choice) for choice in get_args(member))
    elif origin is Annotated:
        base, *extras = get_args(member)
        yield _bounded(base, extras)
    elif origin is list:
        (item,) = get_args(member)
        inner = ", or ".join(_words(item))
        yield f"a list of {inner}" if inner else "a list"
    elif origin is tuple:
        words = [word for part in get_args(member) for word in _words(part)]
        yield f"a list of {len(words)}: {', '.join(words)}"
    elif member in _PLAIN:
        yield _PLAIN[member]


def _bounded(base: Any, extras: list[Any]) -> str:
    text = ", or ".join(word for member in _members(base) for word in _words(member)) or "a value"
    limits: dict[str, Any] = {}
    for extra in extras:
        example = next(iter(_examples(extra)), None)
        if example is not None:
            text = f"{'text' if base is str else 'a number or text'} such as {example!r}"
        for limit in getattr(extra, "metadata", None) or [extra]:
            for name, _ in _BOUNDS:
                if getattr(limit, name, None) is not None:
                    limits[name] = getattr(limit, name)
            if getattr(limit, "pattern", None):
                text = f"text that matches {limit.pattern}"
    bounds = [f"{words} {limits[name]:g}" for name, words in _BOUNDS if name in limits]
    return " ".join([text, " and ".join(bounds)]).strip()


def _examples(extra: Any) -> list[Any]:
    schema = getattr(extra, "json_schema", None)
    return schema.get("examples", []) if isinstance(schema, dict) else []

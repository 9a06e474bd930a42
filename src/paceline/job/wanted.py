"""What a field of the job file takes, in words, from its type."""

from collections.abc import Iterator
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paceline.job.section import section_in

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

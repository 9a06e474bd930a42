"""JSON text to a skill's request, every problem at once; and an answer held against its schema."""

import json
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from pydantic import TypeAdapter

from paceline.errors import JobError
from paceline.job.misread import read_as


def read_request(kind: type[Any], text: str, *, source: str) -> Any:
    """The request in a JSON text.

    Args:
        kind: The skill's `Request`.
        text: One JSON object.

    Raises:
        JobError: Every problem at once: `H030`, it is no JSON object; `J004` to `J006`, a key.
    """
    return read_as(kind, _read_json(text, source), {}, source)


def answer_json(answer: Any) -> dict[str, Any]:
    """An answer as JSON values, after it has been held against its own schema.

    What is unknown is left out: the contracts know no null. A null in what somebody gave stays.
    """
    values: dict[str, Any] = _known(answer)
    TypeAdapter(type(answer)).validate_python(values)  # a slip of ours, if it does not hold
    return values


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """JSON Schema of a request or an answer."""
    schema = TypeAdapter(kind).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _known(value: Any) -> Any:
    """JSON of an answer and its parts, without the fields that are None."""
    if is_dataclass(value):
        found = {each.name: _known(getattr(value, each.name)) for each in fields(value)}
        return {name: each for name, each in found.items() if each is not None}
    return [_known(each) for each in value] if isinstance(value, list | tuple) else value


def _read_json(text: str, source: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                _refuse(source, f"`{key}` is written twice", "keep one of them")
            found[key] = value
        return found

    def no_number(name: str) -> NoReturn:
        _refuse(source, f"{name} is no JSON number", "write a finite number")

    try:
        values = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        place = f"{source} line {error.lineno}, column {error.colno}"
        _refuse(place, f"not JSON: {error.msg}", "fix it; keys and texts stand in double quotes")
    except ValueError:  # Python reads no int of more than 4300 digits
        _refuse(source, "not JSON that can be read: a number has thousands of digits", "shorten it")
    except RecursionError:
        _refuse(source, "not JSON: nested too deep", "a request is a few levels deep")
    if not isinstance(values, dict):
        what = f"a request is a JSON object, this is {_in_json(values)}"
        _refuse(source, what, "see `paceline contract NAME --schema request`")
    return values


def _in_json(value: object) -> str:
    """What kind of value it is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number"
    return "a text" if isinstance(value, str) else "a list"


def _refuse(where: str, what: str, fix: str) -> NoReturn:
    raise JobError.of(code="H030", what=what, where=where, fix=fix)

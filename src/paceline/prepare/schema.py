"""A JSON Schema, and which of its rules a row breaks: types, ranges, patterns, lengths, enums."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from paceline.errors import JobError, did_you_mean
from paceline.job.packages import import_package

_OF_TEXT: Mapping[str, Any] = {
    "integer": int,
    "number": float,
    "boolean": {"true": True, "false": False}.__getitem__,
}
"""Type in the schema -> what makes it of a cell's text."""


class Schema:
    """A schema that was read."""

    def __init__(self, rules: Mapping[str, Any], validator: Any) -> None:
        self.rules = rules
        self._validator = validator
        self._types = {
            name: _types_of(rule)
            for name, rule in rules.get("properties", {}).items()
            if isinstance(rule, Mapping)
        }

    def broken(self, row: Mapping[str, Any], *, is_text: bool) -> Iterator[str]:
        """The rules that a row breaks, without its values.

        Args:
            is_text: All values are texts (csv): each is read as the type that the schema asks.
        """
        if is_text:
            row = {name: _typed(value, self._types.get(name, ())) for name, value in row.items()}
        if self._validator.is_valid(row):
            return
        for error in self._validator.iter_errors(row):
            path = ".".join("[]" if isinstance(part, int) else part for part in error.instance_path)
            yield f"{path or 'row'}: {_rule(error, self.rules)}"


def read_schema(path: Path) -> Schema:
    """The schema in a JSON or YAML file.

    Raises:
        JobError: D022, it cannot be read or is no schema; R010, a package is missing.
    """
    package = import_package("jsonschema_rs", "--schema needs jsonschema-rs", where="--schema")

    def refuse(uri: str) -> Any:
        raise ValueError(f"{uri} is not read: copy it into the file")

    try:
        rules = yaml.safe_load(path.read_bytes())
        if not isinstance(rules, dict):
            raise ValueError(f"it holds {type(rules).__name__}, not an object")
        known = {"properties", "required", "$ref", "allOf", "anyOf", "oneOf", "type", "$defs"}
        known |= {"definitions", "patternProperties", "additionalProperties", "not", "if"}
        if not known & rules.keys():
            near = next((hint for key in rules if (hint := did_you_mean(str(key), known))), "")
            raise ValueError(f"it has no rule of JSON Schema: {', '.join(map(str, rules))}; {near}")
        package.meta.validate(rules)
        validator = package.validator_for(rules, retriever=refuse, validate_formats=True)
    except (OSError, ValueError, yaml.YAMLError, package.ValidationError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise JobError.of(
            code="D022",
            what=f"{path} is no JSON Schema: {reason}",
            where="--schema",
            fix="give a file such as {type: object, required: [text], properties: {text: {type: "
            "string, minLength: 1}}}; see json-schema.org",
        ) from None
    return Schema(rules, validator)


def _types_of(rule: Mapping[str, Any]) -> tuple[str, ...]:
    named = rule.get("type", ())
    return (named,) if isinstance(named, str) else tuple(named)


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    """The text of a cell as the first of these types that it can be."""
    if "null" in types and value == "":
        return None
    for name in types:
        try:
            return _OF_TEXT[name](value)
        except (KeyError, ValueError):
            continue
    return value


def _rule(error: Any, rules: Mapping[str, Any]) -> str:
    """`maximum 120`, `required id`: the rule, as the schema has it."""
    *_, keyword = error.schema_path or ["?"]
    at: Any = rules
    for part in error.schema_path:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            return str(keyword)
    if keyword == "additionalProperties":
        return str(error.message)
    if keyword == "required":
        name = error.message.removesuffix(" is a required property")
        return f"the required column {name} is missing"
    return f"{keyword} {msgspec.json.encode(at).decode()[:80]}"

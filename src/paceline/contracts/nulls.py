"""Reasons for what an answer does not know or does not apply to: JSON's null alone has none."""

from collections.abc import Mapping
from functools import reduce
from typing import Any


def with_null_reasons(
    output: dict[str, Any], reasons: Mapping[str, str], *, key: str = "nullReasons"
) -> dict[str, Any]:
    """The output, and a reason for each of these fields that is null.

    Args:
        reasons: Dotted name of a field -> why it may be null.
        key: Key of the output that the reasons are put in.

    >>> with_null_reasons({"a": {"b": None}, "c": 1}, {"a.b": "not given", "c": "not known"})
    {'a': {'b': None}, 'c': 1, 'nullReasons': {'a.b': 'not given'}}
    """
    found = {
        name: reason
        for name, reason in reasons.items()
        if reduce(lambda value, key: value[key], name.split("."), output) is None
    }
    return output | {key: found}

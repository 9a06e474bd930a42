"""What sections of a job file are made of: the class, numbers with units, and plain numbers."""

import tomllib
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.dataclasses import dataclass as _pydantic_dataclass

from paceline import units

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[_T]) -> type[_T]:
    """A frozen dataclass that refuses unknown keys and whose field texts are its help."""
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    make = _pydantic_dataclass(frozen=True, kw_only=True, config=config)
    return cast(type[_T], make(cls))


def shipped(name: str) -> dict[str, Any]:
    """The tables of a TOML file of this package."""
    return tomllib.loads((files("paceline.job") / name).read_text(encoding="utf-8"))


def _unit(
    parse: Callable[[Any], Any], example: str, *, least: float = 0
) -> tuple[BeforeValidator, WithJsonSchema]:
    """Numbers with units; a plain positive number below `least` has surely lost its unit."""

    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"write a number, or text such as {example!r}")
        if not isinstance(value, str) and 0 < value < least:
            raise ValueError(f"{value} lacks its unit; write it like {example!r}")
        return parse(value)

    schema = {"anyOf": [{"type": "number"}, {"type": "string"}], "examples": [example]}
    return BeforeValidator(read), WithJsonSchema(schema)


Count = Annotated[int, *_unit(units.parse_count, "7B"), Field(gt=0)]
Bytes = Annotated[int, *_unit(units.parse_bytes, "80 GiB", least=2**20), Field(gt=0)]
SmallBytes = Annotated[int, *_unit(units.parse_bytes, "25 MiB", least=2**10), Field(gt=0)]


def _network_rate(value: float | str) -> float:
    if not isinstance(value, str):
        return units.parse_bytes_per_s(value)
    try:
        return units.parse_bytes_per_s(units.split_network(value)[0])
    except ValueError:
        units.parse_bytes_per_s(value)  # a rate that is none is reported before its kind
        raise


def kind_of_network(text: str) -> str | None:
    """The kind that stands beside a rate; None where there is none, or no one."""
    try:
        return units.split_network(text)[1]
    except ValueError:
        return None  # the field's own reader reports it


NetworkRate = Annotated[float, *_unit(_network_rate, "400Gb/s InfiniBand", least=1e6), Field(gt=0)]
Seconds = Annotated[float, *_unit(units.parse_seconds, "30m"), Field(gt=0)]
_LONGEST_WAIT_S = 30 * 86_400.0
"""Beyond a month a wait is never, or a slip."""


def _check_wait(seconds: float) -> float:
    if seconds > _LONGEST_WAIT_S:
        raise ValueError(f"longer than {_LONGEST_WAIT_S / 86_400:.0f} days, which is never")
    return seconds


Wait = Annotated[Seconds, AfterValidator(_check_wait)]


def _no_truth(value: object) -> object:
    """YAML reads yes, no, on and off as truth values, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("this is yes or no, write a number")
    return value


Positive = Annotated[int, BeforeValidator(_no_truth), Field(gt=0)]
Whole = Annotated[int, BeforeValidator(_no_truth), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_no_truth)]
Auto = Literal["auto"]


def section_in(annotation: Any) -> Any:
    """The section that a field of this type holds, also where it may be left out, or None."""
    options = (annotation, *get_args(annotation))
    return next((o for o in options if isinstance(o, type) and is_dataclass(o)), None)

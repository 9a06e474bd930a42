"""What a job asks for itself: every setting that is not at its default."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, cast

from pydantic.fields import FieldInfo

from paceline.job.job import JobSpec


def settings_asked(spec: JobSpec) -> dict[str, Any]:
    """Key -> value of each setting that differs from its default, or has none, in the order of the
    job file: `{"train.steps": 100}`.

    A section that may be left out (`train.adapter`) is one setting.
    """
    return dict(_asked(spec, ""))


def fields_of(kind: type[Any]) -> Mapping[str, FieldInfo]:
    """Name -> what pydantic knows of each field of a section."""
    return cast(Mapping[str, FieldInfo], kind.__pydantic_fields__)


def is_section(field: FieldInfo) -> bool:
    """Whether a field is a section of its own that is always there."""
    return isinstance(field.annotation, type) and is_dataclass(field.annotation)


def _asked(section: Any, before: str) -> Iterator[tuple[str, Any]]:
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        if is_section(field):
            yield from _asked(value, f"{before}{name}.")
        elif field.is_required() or value != field.get_default(call_default_factory=True):
            yield f"{before}{name}", value

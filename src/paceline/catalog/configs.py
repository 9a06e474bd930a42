"""Published models as the fields of their config.json, from `configs.toml`, once a process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from paceline.catalog._rows import no_such
from paceline.catalog.load import read_rows
from paceline.errors import JobError

_NULLS = {"sliding_window", "q_lora_rank"}
"""Fields whose 0 stands for the null of the file itself, which TOML cannot have."""


def _config(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if name in _NULLS and given == 0 else given for name, given in value.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """A published model by the fields of its config.json."""

    name: str
    config: Annotated[Mapping[str, Any], _config]
    """The fields that say the sizes; `profile.from_config` counts them."""

    source: str
    """Where they are from."""


@cache
def load_published_configs() -> Mapping[str, PublishedConfig]:
    """Every model of `configs.toml` by its name."""
    return read_rows("configs.toml", PublishedConfig)


def find_published(name: str, *, where: str) -> PublishedConfig:
    """The published model of that name.

    Raises:
        JobError: `M001`, naming the nearest ones; `where` is its place in the job.
    """
    known = load_published_configs()
    if name not in known:
        raise JobError(no_such("M001", "model preset", name, {each: each for each in known}, where))
    return known[name]

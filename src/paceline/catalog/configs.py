"""Published models as the fields of their config.json, from `configs.toml`, once a process."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.catalog.load import ModelPreset, load_model_presets
from paceline.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """A published model by the fields of its config.json."""

    name: str
    config: Mapping[str, Any]
    """The fields that say the sizes; `profile.families` counts them."""

    source: str
    """Where they are from."""


@cache
def load_published_configs() -> Mapping[str, PublishedConfig]:
    """Every model of `configs.toml` by its name."""
    text = (files("paceline.catalog") / "configs.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {name: PublishedConfig(name=name, **row) for name, row in rows.items()}


def preset_names() -> list[str]:
    """Every name that `model.preset` may be."""
    return [*load_model_presets(), *load_published_configs()]


def find_published(name: str, *, where: str) -> ModelPreset | PublishedConfig:
    """The published model of that name.

    Raises:
        JobError: `M001`, naming the nearest ones; `where` is its place in the job.
    """
    found = load_model_presets().get(name) or load_published_configs().get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), preset_names(), n=3, cutoff=0.5)
    raise JobError.of(
        code="M001",
        what=f"the catalog has no model preset `{name}`",
        where=where,
        fix=f"did you mean {' or '.join(f'`{each}`' for each in near)}? "
        "`paceline plan --help` lists all"
        if near
        else f"choose one of {', '.join(preset_names())}",
    )

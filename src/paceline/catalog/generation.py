"""Generations of accelerators, known by the names that people write: what depends on no figure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from paceline.catalog._rows import text
from paceline.catalog.load import read_rows

_Names = Annotated[re.Pattern[str], lambda value: re.compile(text(value), re.I)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One row of generations.toml. None is unknown."""

    name: str
    names: _Names
    alone: _Names | None = None
    """Names that are something else inside other words."""

    has_bf16: bool | None = None


@cache
def load_generations() -> Mapping[str, Generation]:
    """Every generation by its name, longer names of cards first."""
    return read_rows("generations.toml", Generation)


def generation_of(gpu: str) -> Generation | None:
    """The generation of an accelerator as its owner writes it; None where the name says none.

    >>> [generation_of(name).name for name in ("A100-SXM4-80GB", "rtx_6000_ada", "gtx1080ti")]
    ['Ampere', 'Ada', 'Pascal']
    """
    plain = _plain(gpu)
    for known in load_generations().values():
        if known.names.search(plain) or (known.alone and known.alone.fullmatch(plain)):
            return known
    return None


def gpu_in(text: str) -> str | None:
    """The name of an accelerator inside an option or a label.

    >>> gpu_in("gpu:nvidia_a100:4"), gpu_in("a2-highgpu-8g")
    ('A100', None)
    """
    plain = _plain(text)
    found = (known.names.search(plain) for known in load_generations().values())
    return next((match[0].upper() for match in found if match is not None), None)


def _plain(name: str) -> str:
    return re.sub(r"[-_]+", " ", name).strip().lower()

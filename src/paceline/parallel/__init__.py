"""How to split: layouts, the laws they obey, and all that a job leaves possible."""

from typing import TYPE_CHECKING, Any

from paceline.choices import Sharding
from paceline.parallel.layout import Layout

if TYPE_CHECKING:
    from paceline.parallel.abilities import Abilities, abilities_of, reasons_ours_cannot
    from paceline.parallel.candidates import Space, grids
    from paceline.parallel.laws import check_layout_choices
    from paceline.parallel.replicas import neighbour_of, replicas_of
    from paceline.parallel.table import Layouts, table_of

__all__ = [
    "Abilities",
    "Layout",
    "Layouts",
    "Sharding",
    "Space",
    "abilities_of",
    "check_layout_choices",
    "grids",
    "neighbour_of",
    "reasons_ours_cannot",
    "replicas_of",
    "table_of",
]

_WHERE = {
    "Abilities": "abilities",
    "Layouts": "table",
    "Space": "candidates",
    "abilities_of": "abilities",
    "check_layout_choices": "laws",
    "grids": "candidates",
    "neighbour_of": "replicas",
    "reasons_ours_cannot": "abilities",
    "replicas_of": "replicas",
    "table_of": "table",
}


def __getattr__(name: str) -> Any:
    """These bring numpy and the job file's models, which a message with a layout does without."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

"""How to split: layouts, the laws they obey, and all that a job leaves possible."""

from paceline.parallel.abilities import Abilities, abilities_of, reasons_ours_cannot
from paceline.parallel.candidates import Space, candidates, grids
from paceline.parallel.laws import check_layout_choices
from paceline.parallel.layout import Layout, Sharding
from paceline.parallel.replicas import neighbour_of, replicas_of, replicas_of_rank
from paceline.parallel.table import Layouts, table_of

__all__ = [
    "Abilities",
    "Layout",
    "Layouts",
    "Sharding",
    "Space",
    "abilities_of",
    "candidates",
    "check_layout_choices",
    "grids",
    "neighbour_of",
    "reasons_ours_cannot",
    "replicas_of",
    "replicas_of_rank",
    "table_of",
]

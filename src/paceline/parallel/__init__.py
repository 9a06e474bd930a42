"""How to split: layouts, the laws they obey, and all that a job leaves possible."""

from paceline.parallel.candidates import candidates
from paceline.parallel.laws import check_layout_choices
from paceline.parallel.layout import Layout, Sharding
from paceline.parallel.table import Layouts, table_of

__all__ = ["Layout", "Layouts", "Sharding", "candidates", "check_layout_choices", "table_of"]

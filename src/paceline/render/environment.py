"""Environment variables of a plan's ranks, each with its reason, and harmful ones to take away.

What they are is the plan's (`plan/start.py`), so that its documents and these files agree.
"""

from paceline.plan.start import Removal, Variable, environment, export_lines, removals

__all__ = ["Removal", "Variable", "environment", "export_lines", "removals"]

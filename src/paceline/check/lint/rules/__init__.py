"""The table of rules over programs: one function a failure. A new rule is a function, a row in its
module's table, and the text of its finding in the TOML file beside it. Its level is derived from a
row of benchmarks/data/lint_basis.csv: without independent cases it is a hint, or an error by proof.
"""

from collections.abc import Callable, Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.program import Program
from paceline.check.lint.rules import (
    accumulation,
    agreement,
    decisions,
    devices,
    parallel,
    precision,
    samplers,
    saving,
)

Rule = Callable[[Program, Context], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *accumulation.RULES,
    *agreement.RULES,
    *decisions.RULES,
    *devices.RULES,
    *parallel.RULES,
    *precision.RULES,
    *samplers.RULES,
    *saving.RULES,
)
"""In no particular order: findings are sorted by their place."""

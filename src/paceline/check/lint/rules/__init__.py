"""The table of rules over programs: one function a failure. A new rule is a function and a row."""

from collections.abc import Callable, Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.program import Program
from paceline.check.lint.rules import (
    accumulation,
    agreement,
    compiling,
    data,
    ddp,
    decisions,
    devices,
    find_unused,
    forks,
    frameworks,
    groups,
    host_memory,
    local_disk,
    numerics,
    parallel,
    partitioned,
    precision,
    ray,
    reentrant,
    samplers,
    saving,
    sharded,
    shared_randomness,
    sizes,
    streams,
    unprepared,
    unused,
    waiting,
    workers,
    written_files,
    zero3,
)

Rule = Callable[[Program, Context], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *accumulation.RULES,
    *agreement.RULES,
    *compiling.RULES,
    *data.RULES,
    *ddp.RULES,
    *decisions.RULES,
    *devices.RULES,
    *find_unused.RULES,
    *forks.RULES,
    *frameworks.RULES,
    *groups.RULES,
    *host_memory.RULES,
    *local_disk.RULES,
    *numerics.RULES,
    *parallel.RULES,
    *partitioned.RULES,
    *precision.RULES,
    *ray.RULES,
    *reentrant.RULES,
    *samplers.RULES,
    *saving.RULES,
    *sharded.RULES,
    *shared_randomness.RULES,
    *sizes.RULES,
    *streams.RULES,
    *unprepared.RULES,
    *unused.RULES,
    *waiting.RULES,
    *workers.RULES,
    *written_files.RULES,
    *zero3.RULES,
)
"""In no particular order: findings are sorted by their place."""

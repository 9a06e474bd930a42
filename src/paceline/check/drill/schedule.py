"""Random schedules of faults: a seed -> who is hit, how, when and where. The same for ever."""

import random
from collections.abc import Sequence

from paceline.job.fault_grammar import KINDS

QUICK = ("kill", "kill", "kill", "segv", "abort", "exit", "raise", "store", "spare")
"""Kinds that are known at once; SIGKILL more often, as the machine's own way to end a process.
Those that only a time-out finds (`stop`, `deadlock`) take seconds each, and are asked for."""

_PLACES = ("start", "forward", "backward", "reduce", "vote", "apply", "applied")
_IN_RECOVERY = ("meet", "restore")


def random_schedule(
    seed: int,
    *,
    num_faults: int,
    num_ranks: int,
    first_step: int,
    last_step: int,
    kinds: Sequence[str] = QUICK,
) -> tuple[str, ...]:
    """Faults in the order of their steps.

    About one in five hits during the recovery from the one before it, at the same step.

    Args:
        kinds: To draw from, as often as they stand there.

    >>> random_schedule(7, num_faults=2, num_ranks=2, first_step=2, last_step=9)
    ('raise rank=0 step=4 phase=start', 'spare rank=0 step=7 phase=backward')
    """
    draw = random.Random(seed)
    steps = sorted(draw.randint(first_step, last_step) for _ in range(num_faults))
    found: list[str] = []
    before = first_step
    for number, step in enumerate(steps):
        kind, rank = draw.choice(kinds), draw.randrange(num_ranks)
        place = draw.choice(_PLACES)
        can_follow = number > 0 and KINDS[kind].end == "recovers" and kind != "raise"
        if can_follow and draw.random() < 0.2:
            place, step = draw.choice(_IN_RECOVERY), before
        before = step
        found.append(f"{kind} rank={rank} step={step} phase={place}")
    return tuple(found)

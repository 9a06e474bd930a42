"""A system that stops as a whole and goes on after a fixed time: what others are compared with.

Not our controller: a few published numbers, played through on the same faults and entered into the
same ledger.
"""

from collections.abc import Sequence

from paceline.simulation.costs import System
from paceline.simulation.failures import Fault
from paceline.simulation.goodput import Ledger, Part
from paceline.simulation.machines import Machines
from paceline.simulation.rhythm import Rhythm, train


def play(
    system: System,
    faults: Sequence[Fault],
    *,
    rhythm: Rhythm,
    machines: Machines,
    ranks: int,
    horizon_s: float,
    fails_while_down: bool = True,
) -> Ledger:
    """The ledger of a system over the faults.

    Args:
        ranks: For phases that grow.
        horizon_s: Where the run ends.
        fails_while_down: Otherwise the times of the faults count training only, and none comes
            during a recovery: what closed forms often assume.
    """
    ledger = Ledger()
    step = saved = 0
    now = 0.0
    back = 0.0  # when training goes on
    pending: list[tuple[Part, float]] = []  # phases of the recovery under way, with their ends
    down_s = 0.0
    for fault in [*faults, None]:
        later_s = 0.0 if fails_while_down else down_s
        at = horizon_s if fault is None else min(fault.at_s + later_s, horizon_s)
        now = _pass_through(ledger, pending, now, min(at, back))
        if at > back:
            stretch = train(rhythm, step, at - back)
            stretch.enter(ledger, rhythm)
            step += stretch.steps
            saved = saved if stretch.committed is None else stretch.committed
            now = at
        if fault is None or at >= horizon_s:
            break
        if fault.takes_nodes:
            machines.lose(at, fault.num_nodes)
        if system.lost == "checkpoint" and step > saved:
            ledger.lose((step - saved) * rhythm.step_s)
            step = saved
        known = at + system.detect.at(ranks, rhythm.step_s)
        able = machines.enough_at(known)
        back = able + system.restart.at(ranks, rhythm.step_s)
        down_s += back - at
        pending = [("detect", known), ("idle", able), ("meet", back)]
    return ledger


def _pass_through(
    ledger: Ledger, pending: list[tuple[Part, float]], now: float, until_s: float
) -> float:
    """Account for the phases of a recovery from now on, as far as they come."""
    for part, end in pending:
        end = min(end, until_s)
        if end > now:
            ledger.add(part, end - now)
            now = end
    return now

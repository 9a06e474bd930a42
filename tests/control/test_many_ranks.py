"""What a message costs the controller's core does not grow with the number of ranks."""

import random
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from tests.control.test_core import SETUP

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.core import decide


class Counted:
    """Counts the lines of Python that run."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> "Counted":
        self.lines += event == "line"
        return self

    def __enter__(self) -> "Counted":
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def lines_a_rank(num_ranks: int) -> tuple[float, float]:
    """Of forming the first generation, and of parking after a node was lost for good."""
    setup = replace(SETUP, num_nodes=num_ranks)
    state, clock = st.State(setup=setup), st.Clock(monotonic_s=1.0, unix_s=1.0)
    order = random.Random(0).sample(range(num_ranks), num_ranks)

    def feed(event: st.Happening) -> None:
        decide(state, event, clock)

    def all_say(generation: int, message: say.FromWorker) -> None:
        for number in order:
            feed(say.Said(worker=number, generation=generation, message=message))

    with Counted() as forming:
        feed(st.Begin())
        for node in order:
            feed(st.AgentJoined(node))
        all_say(0, say.Ready(host="h", port=1))
        all_say(1, say.Met(world_size=num_ranks, backend="gloo"))
        all_say(1, say.Restored(first_step=1, source="own", checkpoint=None, refused=[]))
        all_say(1, say.StepDone(step=1, loss=1.0, tokens_per_s=1.0, unit="tokens"))
    assert state.phase == "training"
    with Counted() as parking:
        feed(st.AgentLost(order.pop()))
        all_say(1, say.Parked(applied_step=1))
    assert (state.phase, len(state.empty)) == ("forming", 1)
    return forming.lines / num_ranks, parking.lines / num_ranks


def test_a_rank_more_costs_the_same_at_64_ranks_as_at_16():
    few, many = lines_a_rank(16), lines_a_rank(64)
    assert many[0] < 1.3 * few[0]
    assert many[1] < 1.3 * few[1]


def test_all_ranks_have_longer_to_meet_the_more_they_are():
    assert round(SETUP.meet_limit_s(2)) == 60
    for num_ranks, reported_s in ((16384, 200), (22000, 300), (64000, 600), (98000, 900)):
        assert SETUP.meet_limit_s(num_ranks) > 1.6 * reported_s  # NCCL's cold start, 2602.00277

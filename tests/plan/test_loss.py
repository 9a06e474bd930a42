"""`train.loss_chunk` in a plan: booked, recorded, refused by name where it cannot be done."""

import pytest
from tests.plan.scene import JOB, TINY, plan_of

from paceline.errors import PlanError
from paceline.plan import plan_from_json, plan_to_json

PP = ("layout.pipeline=2", "layout.data=1")


def test_a_loss_in_chunks_is_booked_and_recorded():
    sizes = ("model.decoder.vocab=65536", "layout.sharding=none")
    whole, chunked = plan_of(TINY, *sizes), plan_of(TINY, *sizes, "train.loss_chunk=64")
    assert (whole.loss_chunk, chunked.loss_chunk) == (0, 64)
    assert plan_from_json(plan_to_json(chunked)).loss_chunk == 64
    saved = [plan.estimate.memory.parts["activations"] for plan in (chunked, whole)]
    assert saved[0] < 0.3 * saved[1]


def test_another_engine_has_its_own_loss():
    assert plan_of(JOB, "engine=torchtitan", "train.loss_chunk=64").loss_chunk == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("program=mine:train",), "code of your own"),
        ((*PP, "layout.schedule=gpipe"), "gpipe"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(settings, why):
    with pytest.raises(PlanError, match=f"L044.*{why}"):
        plan_of(TINY, *settings, "train.loss_chunk=64")

"""`train.loss_chunk` and `train.router_loss` in a plan: recorded, and refused by name."""

import json
from pathlib import Path

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
        (("data={kind: preference, path: a}", "model.tokenizer=t"), "train.objective dpo"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(settings, why):
    with pytest.raises(PlanError, match=f"L044.*{why}"):
        plan_of(TINY, *settings, "train.loss_chunk=64")


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}


def balancing_of(folder: Path, *settings: str, **fields: object) -> tuple[float, str]:
    """The plan's coefficient, and what it says of it."""
    path = folder / "config.json"
    path.write_text(json.dumps(MIXTRAL | fields))
    plan = plan_of(TINY, f"model={{hf_config: {path}}}", *settings)
    said = [each for each in plan.decisions if each.field == "balancing loss"]
    return plan.router_loss, " ".join(f"{each.value} {each.reason}" for each in said)


def test_a_config_that_asks_for_a_balancing_loss_gets_it(tmp_path):
    assert balancing_of(tmp_path)[0] == 0
    assert "train.router_loss adds" in balancing_of(tmp_path)[1]
    found, said = balancing_of(tmp_path, output_router_logits=True)
    assert (found, "0.02 router_aux_loss_coef" in said) == (0.02, True)
    ours = balancing_of(tmp_path, "train.router_loss=0.5", output_router_logits=True)
    assert ours == (0.5, "")
    assert balancing_of(tmp_path, "train.router_loss=0", output_router_logits=True)[0] == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (PP, "several stages"),
        (("train.compile=true",), "not compiled"),
        (("program=mine:train",), "code of your own"),
    ],
)
def test_a_balancing_loss_that_cannot_be_had_is_refused_by_name(settings, why, tmp_path):
    with pytest.raises(PlanError, match=f"L045.*{why}"):
        balancing_of(tmp_path, *settings, "train.router_loss=0.01")


def test_a_model_without_routers_has_no_balancing_loss():
    with pytest.raises(PlanError, match="L045"):
        plan_of(TINY, "train.router_loss=0.01")
    assert plan_of(TINY, "train.router_loss=0").router_loss == 0

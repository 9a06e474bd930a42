"""Models that a person's own code wrapped with peft, in layouts over data and tensor ranks."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.runtime.equality import relative, whole_state
from tests.runtime.tensor_models import tiny
from tests.runtime.tiny import fake_rank
from torch.distributed.tensor import DTensor

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.state import named_parameters, named_state, parameter_places
from paceline.runtime.step import Step
from paceline.runtime.trainer import Trainer

peft = pytest.importorskip("peft")

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"data": 2, "sharding": "none"},
    "FSDP2": {"data": 2, "sharding": "full"},
    "TP": {"data": 1, "sharding": "none", "tensor": 2},
    "TP without SP": {"data": 1, "sharding": "none", "tensor": 2, "sequence_parallel": False},
}
BATCH, STEPS = 4, 3
ALONE = Layout(data=1, sharding="none", micro_batch=BATCH, accumulation=1)

pytestmark = pytest.mark.filterwarnings("ignore")


def wrapped(kind: str = "llama", **changes: Any) -> torch.nn.Module:
    """A tiny model of transformers as peft's guide wraps it, in float64, with nothing at zero."""
    fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    asked = peft.LoraConfig(**fields | changes)
    model: torch.nn.Module = peft.get_peft_model(tiny(kind), asked).double()
    return model


def built(layout: Layout, kind: str = "llama", **changes: Any) -> Any:
    """As `Session.build` does it."""
    meshes = strategy.make_meshes(layout, "cpu")
    blueprint = Blueprint(lambda: wrapped(kind, **changes), 3)
    fill = Filler(blueprint, torch.device("cpu"))
    return strategy.apply(
        blueprint.take_model(), layout, meshes, precision="fp32", fill=fill
    ), meshes


def train(layout: Layout, kind: str) -> dict[str, Any]:
    """A person's own loop."""
    model, meshes = built(layout, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        layout=layout,
        meshes=meshes,
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
        clip_norm=1.0,
    )
    tokens = torch.arange(BATCH * STEPS * 17).view(-1, 17) * 5 % 67
    losses = []
    for number in range(1, STEPS + 1):
        step = Step(number, trainer, 0.5)
        for ids in step.micro_batches(len(tokens)):
            logits = model(input_ids=tokens[ids, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[ids, 1:].flatten())
            step.backward(loss)
        step.apply()
        losses.append(step.loss)
    places = parameter_places(model)
    state = {}
    for name, value in named_parameters(model).items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[places[name].name, places[name].offset] = places[name].size, whole.detach().numpy()
    saved = {name for name in named_state(model, optimizer) if name != "model/frozen"}
    sent = {name for name, _ in LiveState(model, optimizer).tensors()}
    return {"losses": losses, "state": state, "saved": saved, "sent": sent}


def train_all(rank: int, world: int, kind: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for an old name
    if world == 1:
        return {"alone": train(ALONE, kind)}
    found = {}
    for name, fields in LAYOUTS.items():
        micro = BATCH // fields["data"]
        found[name] = train(Layout(micro_batch=micro, accumulation=1, **fields), kind)
    return found


@pytest.mark.ranks
def test_a_peft_model_trains_in_each_layout_as_on_one_device():
    alone = run_ranks(train_all, 1, "llama")[0]["alone"]
    ranks = run_ranks(train_all, 2, "llama")
    wanted = whole_state([alone])
    for name in LAYOUTS:
        found = whole_state([rank[name] for rank in ranks])
        assert found.keys() == wanted.keys()
        worst = max(relative(found[each], value) for each, value in wanted.items())
        assert worst < 1e-6, name  # its norms compute in float32
        assert relative(ranks[0][name]["losses"], alone["losses"]) < 1e-6
        for kept in (ranks[0][name]["saved"], ranks[0][name]["sent"]):
            assert kept
            assert all("lora_" in each for each in kept), name


TENSOR = Layout(data=1, sharding="none", micro_batch=1, accumulation=1, tensor=2)


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("llama", {"use_dora": True}, "self_attn.q_proj is a peft"),
        ("gpt2", {}, "attn.c_attn is a peft"),
        ("opt", {}, "fc1 is a peft"),
        ("llama", {"target_modules": ["embed_tokens"]}, "embed_tokens is a peft"),
    ],
)
def test_what_tensor_ranks_cannot_split_is_named(kind: str, changes: dict[str, Any], what: str):
    with fake_rank(TENSOR, 0), pytest.raises(PlanError, match="L020") as caught:
        built(TENSOR, kind, **changes)
    assert what in str(caught.value)


def test_pipeline_stages_are_refused():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=2, pipeline=2)
    with fake_rank(layout, 0), pytest.raises(PlanError, match="not split over stages"):
        built(layout)


def test_heads_that_tensor_ranks_do_not_share_evenly_are_refused_beside_peft():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1, tensor=8)
    with fake_rank(layout, 0), pytest.raises(PlanError, match="L005") as caught:
        built(layout)
    assert "4 heads" in str(caught.value)


def test_weights_that_a_factory_read_have_a_digest_of_their_own(tmp_path: Path):
    tiny("llama").save_pretrained(tmp_path / "one")
    torch.manual_seed(5)
    tiny("llama").save_pretrained(tmp_path / "two")
    from transformers import AutoModelForCausalLM

    def make(name: str) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        return peft.get_peft_model(model, peft.LoraConfig(r=4))

    digests = []
    for name in ("one", "one", "two"):
        blueprint = Blueprint(lambda name=name: make(name), 3)
        whole = blueprint.take_model()
        with fake_rank(ALONE, 0):
            meshes = strategy.make_meshes(ALONE, "cpu")
            fill = Filler(blueprint, torch.device("cpu"))
            model = strategy.apply(whole, ALONE, meshes, precision="fp32", fill=fill)
        digests.append(model.paceline_frozen_digest)
    assert digests[0] == digests[1] != digests[2]

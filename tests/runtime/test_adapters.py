"""Adapters: what they compute, in peft's eyes and in every layout, and what is kept of a model."""

from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.equality import LAYOUTS, alone_layout, deviation, layout_of, train
from tests.runtime.tensor_models import logits_of, tiny
from tests.runtime.tiny import fake_rank

from paceline.errors import PlanError, RunError
from paceline.job import TrainSpec
from paceline.parallel.layout import Layout
from paceline.profile.adapter import Adaptation, linear_name
from paceline.runtime import strategy
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.state import model_state, named_state, set_other_model_state
from paceline.runtime.strategy.adapter.linear import frozen_parameters
from paceline.runtime.strategy.adapter.place import add_adapters
from paceline.runtime.strategy.pipeline.schedules import stream_type
from paceline.runtime.strategy.tensor.fused import out_features
from paceline.runtime.strategy.tensor.rules import LINEARS
from paceline.runtime.strategy.ways.find import ways_of

ROUNDING = 1e-12
"""As in `test_layouts.py`."""

TRIED = ("DDP", "ZeRO-2", "TP x FSDP2", "TP without SP", "PP 1F1B x FSDP2")
REPEATED = ("FSDP2", "HSDP")  # shards are in two of the others
SLOW = tuple(name for name in LAYOUTS if name not in (*TRIED, *REPEATED))


def asked_of(model: torch.nn.Module, targets: tuple[str, ...], **changes: Any) -> Adaptation:
    """An adaptation with the parameters that the model's linears of these names have."""
    ways = ways_of(model)
    assert ways is not None
    found = [
        module
        for name, module in model.get_submodule(ways.blocks).named_modules()
        if type(module).__name__ in LINEARS and linear_name(name.partition(".")[2]) in targets
    ]
    rank = changes.get("rank", 4)
    num = sum(rank * sum(module.get_parameter("weight").shape) for module in found)
    num += sum(map(out_features, found)) if changes.get("has_magnitudes") else 0
    fields: dict[str, Any] = {
        "targets": targets,
        "rank": rank,
        "scale": 2.0,
        "dropout": 0.0,
        "frozen_type": "float32",
        "num_parameters": num,
        "seed": 7,
    }
    return Adaptation(**fields | changes)


ALL = ("query", "key", "value", "query_key_value", "attention_output", "gate", "up", "down")


def adapted(kind: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tiny(kind)
    return add_adapters(model, asked_of(model, ALL, **changes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_forward_and_gradients_are_those_of_peft(kind: str, dora: bool):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    asked = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=dora)
    theirs = peft.get_peft_model(tiny(kind), asked).double()
    ours = adapted(kind, has_magnitudes=dora).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:  # B is drawn as well, or A would have no gradient
                parameter.normal_(std=0.1, generator=generator)
                theirs.get_parameter(peft_name(name)).copy_(parameter)
    tokens = torch.arange(32).view(2, 16) * 5 % 67
    for model in (ours, theirs):
        logits_of(model, tokens).square().mean().backward()
    torch.testing.assert_close(
        logits_of(ours, tokens), logits_of(theirs, tokens), rtol=0, atol=1e-5
    )
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    assert len(trained) == sum(each.requires_grad for each in theirs.parameters())
    for name, parameter in trained.items():
        found = theirs.get_parameter(peft_name(name)).grad
        torch.testing.assert_close(parameter.grad, found, rtol=1e-4, atol=1e-9)


def peft_name(name: str) -> str:
    return f"base_model.model.{name}.default.weight"


def test_initial_magnitudes_are_the_lengths_of_what_is_read_or_drawn():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1)
    blueprint = Blueprint(lambda: adapted("own", has_magnitudes=True), 7)
    with fake_rank(layout, 0):
        model = built(layout, blueprint, draws=True)
    for name, magnitude in model.named_parameters():
        if name.endswith("lora_magnitude_vector"):
            weight = model.get_parameter(f"{name.rpartition('.')[0]}.weight")
            assert torch.equal(magnitude, torch.linalg.vector_norm(weight, dim=1))
            assert magnitude.requires_grad


@pytest.mark.parametrize("dora", [False, True])
def test_initial_adapters_change_nothing_and_are_drawn_as_peft_draws(dora: bool):
    torch.manual_seed(0)
    plain, tokens = tiny("own"), torch.arange(16)[None]
    model = adapted("own", has_magnitudes=dora)
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=0, atol=1e-6 if dora else 0.0)
    a_RI = model.get_parameter("blocks.0.attention.query.lora_A")
    assert a_RI.abs().max() <= 1 / 32**0.5  # Kaiming with a = sqrt 5: 1 / sqrt(inputs)
    assert a_RI.std() > 0.5 / 32**0.5
    assert not model.get_parameter("blocks.0.attention.query.lora_B").any()


def test_dropout_is_drawn_from_the_steps_generator():
    model, tokens = adapted("own", dropout=0.5), torch.arange(16)[None]
    with torch.no_grad():
        model.get_parameter("blocks.0.ffn.up.lora_B").fill_(1.0)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_other_linears_than_were_planned_are_refused():
    with pytest.raises(PlanError, match="R013"):
        adapted("own", num_parameters=1)


def test_frozen_parameters_have_the_type_of_the_products():
    model = adapted("own-tied", frozen_type="bfloat16")
    assert {each.dtype for each in frozen_parameters(model)} == {torch.bfloat16}
    assert model.get_parameter("output.weight") is model.get_parameter("embedding.weight")
    trained = [each for each in model.parameters() if each.requires_grad]
    assert {each.dtype for each in trained} == {torch.float32}


def test_every_stage_hands_on_the_type_of_the_frozen_parameters():
    model = adapted("own", frozen_type="bfloat16")
    parts = [model, model.get_submodule("blocks.1.attention.query")]
    assert [stream_type(part) for part in parts] == [torch.bfloat16] * 2


def built(layout: Layout, blueprint: Blueprint, *, draws: bool) -> torch.nn.Module:
    model = blueprint.take_model()
    meshes = strategy.make_meshes(layout, "cpu")
    filler = Filler(blueprint, torch.device("cpu"), draws=draws)
    return strategy.apply(model, layout, meshes, precision="fp32", fill=filler, sends=False)


def blueprint_of(seed: int) -> Blueprint:
    return Blueprint(lambda: adapted("own", seed=seed), seed)


def test_what_is_saved_and_sent_is_the_adapters_alone():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1)
    with fake_rank(layout, 0):
        model = built(layout, blueprint_of(7), draws=True)
    optimizer = make_optimizer(model, TrainSpec(global_batch=1, steps=1))
    model(torch.arange(16)[None]).sum().backward()
    optimizer.step()
    names = set(named_state(model, optimizer)) - {"model/frozen"}
    assert names
    assert all("lora_" in name for name in names)
    assert all("lora_" in name for name, _ in LiveState(model, optimizer).tensors())


def test_frozen_weights_are_made_again_where_a_state_is_put_over_them():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1)
    with fake_rank(layout, 0):
        first = built(layout, blueprint_of(7), draws=True)
        again = built(layout, blueprint_of(7), draws=False)
        other = built(layout, blueprint_of(8), draws=False)
    pairs = zip(frozen_parameters(first), frozen_parameters(again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    state = {name: each for name, each in model_state(first).items() if name == "model/frozen"}
    set_other_model_state(again, state)
    with pytest.raises(RunError, match="R065"):
        set_other_model_state(other, state)


def train_all(rank: int, world: int, names: list[str], kind: str) -> dict[str, Any]:
    return {name: train(layout_of(LAYOUTS[name], {}), kind) for name in names}


def train_alone(rank: int, world: int, kind: str) -> dict[str, Any]:
    return train(alone_layout(), kind)


def check(names: list[str], kind: str) -> None:
    alone = run_ranks(train_alone, 1, kind)[0]
    ranks = run_ranks(train_all, 4, names, kind)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in names}
    assert {name: each for name, each in found.items() if not each <= ROUNDING} == {}


@pytest.mark.ranks
def test_adapters_train_in_each_layout_as_on_one_device():
    check(list(TRIED), "adapters")


@pytest.mark.ranks
@pytest.mark.repeat
def test_adapters_train_in_layouts_of_shards_alone_as_on_one_device():
    check(list(REPEATED), "adapters")


@pytest.mark.ranks
@pytest.mark.slow
def test_adapters_train_in_every_layout_as_on_one_device():
    check(list(SLOW), "adapters")


@pytest.mark.ranks
@pytest.mark.slow
def test_adapters_beside_fused_linears_train_as_on_one_device():
    check(["FSDP2", "TP x FSDP2", "TP without SP", "PP x TP"], "gpt2 lora adapters")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        ("TP x FSDP2",),  # norms over both kinds of parts
        pytest.param(("FSDP2", "TP without SP", "PP 1F1B x FSDP2"), marks=pytest.mark.repeat),
    ],
    ids=" and ".join,
)
def test_dora_trains_in_each_layout_as_on_one_device(names: tuple[str, ...]):
    check(list(names), "dora adapters")


@pytest.mark.ranks
@pytest.mark.slow
def test_dora_trains_in_every_layout_as_on_one_device():
    check([name for name in LAYOUTS if name != "TP 4"], "dora adapters")
    check(["FSDP2", "TP x FSDP2", "TP without SP", "PP x TP"], "gpt2 dora adapters")

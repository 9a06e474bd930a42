"""Models built without their numbers, and each rank's part drawn into the split model."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime import equality
from tests.runtime.test_own_module import Own
from torch import nn

from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.initial import program
from paceline.runtime.initial.blueprint import Blueprint, Blueprints, why_whole
from paceline.runtime.initial.fill import Filler
from paceline.runtime.state import MODEL, Stored, boxes_of, model_state

SEED = 11

LAYOUTS = ("DDP", "FSDP2", "HSDP", "TP 4", "TP x FSDP2", "PP 1F1B x FSDP2", "PP zero-bubble")
"""Of every model; the built-in one is built in all of `equality.LAYOUTS`."""


def make(name: str) -> nn.Module:
    if name == "own":
        return Own()
    if name == "built-in":
        return Decoder(equality.SHAPE, equality.SEQ_LEN)
    return build_hf(equality.CONFIGS[name])


def one_process(name: str) -> dict[str, Any]:
    """What one process draws that builds the whole model."""
    torch.manual_seed(SEED)
    return {n: p.detach().numpy() for n, p in make(name).named_parameters()}


@functools.cache
def meshes_of(layout: Layout) -> strategy.Meshes:
    """Made once for all models: each has groups with threads of their own, 800 in all otherwise."""
    return strategy.make_meshes(layout, "cpu")


def built(name: str, layout: Layout) -> tuple[nn.Module, strategy.Meshes]:
    meshes = meshes_of(layout)
    blueprint = Blueprint(lambda: make(name), SEED)
    assert blueprint.why_whole is None, blueprint.why_whole
    model = strategy.apply(
        blueprint.take_model(),
        layout,
        meshes,
        precision="fp32",
        fill=Filler(blueprint, torch.device("cpu")),
    )
    return model, meshes


def pieces(model: nn.Module) -> dict[Any, Any]:
    """What this rank has of each parameter: name and offset -> size of the whole, values."""
    return {
        (name.removeprefix(MODEL), box.offset): (stored.size, box.tensor.numpy().copy())
        for name, stored in model_state(model).items()
        if isinstance(stored, Stored)
        for box in boxes_of(stored)
    }


def drawn_in_layouts(rank: int, world: int, names: tuple[str, ...]) -> dict[Any, Any]:
    program.BLOCK = 96  # so that every matrix is drawn in many blocks
    some = {layout: equality.LAYOUTS[layout] for layout in LAYOUTS}
    own = {"built-in": equality.LAYOUTS, "mixtral": equality.EXPERT_LAYOUTS}
    return {
        (name, layout): _pieces(name, fields)
        for name in names
        for layout, fields in own.get(name, some).items()
    }


def _pieces(name: str, fields: dict[str, Any]) -> dict[Any, Any]:
    model, _ = built(name, equality.layout_of(fields, {}))
    return pieces(model)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        ("own", "mixtral"),
        pytest.param(("built-in", "llama", "gpt2"), marks=pytest.mark.repeat),
    ],
    ids=" and ".join,
)
def test_every_layout_begins_with_the_bits_that_one_process_draws(names: tuple[str, ...]):
    pytest.importorskip("transformers")
    ranks = run_ranks(drawn_in_layouts, 4, names)
    assert {name for name, _ in ranks[0]} == set(names)
    for case in ranks[0]:
        found = equality.whole_state([{"state": rank[case]} for rank in ranks])
        expected = one_process(case[0])
        assert found.keys() == expected.keys(), case
        for key, value in expected.items():
            assert np.array_equal(found[key], value), (case, key)


class Odd(nn.Module):
    """What factories do beside calling torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
        )
        self.half = nn.Linear(8, 8).half()
        self.words = nn.Embedding(77, 33, padding_idx=3)
        self.narrow = nn.Linear(64, 100)
        nn.init.trunc_normal_(self.narrow.weight, std=1.0)
        self.turn = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 20)))
        self.random = nn.Parameter(torch.randn(10) * 0.3)
        self.given = nn.Parameter(torch.from_numpy(np.full((3, 3), 2, dtype=np.float32)))
        self.few = nn.Parameter(nn.init.sparse_(torch.empty(10, 10), 0.3))
        self.register_buffer("mask", torch.ones(6, 6).tril().bool(), persistent=False)
        self.register_buffer("projection", torch.randn(5, 5))
        self.register_buffer("mean", torch.zeros(3))
        self.table = torch.arange(6) / 3 + torch.zeros(6)
        self.tied = nn.Linear(33, 77, bias=False)
        self.tied.weight = self.words.weight
        with torch.no_grad():
            self.narrow.bias[:5] = 1
            self.words.weight[0].uniform_()
            self.encoder.layers[0].linear1.weight.data.mul_(2)
            self.narrow.weight.data = self.narrow.weight.data.flip(0)
        self.last = nn.Linear(3, 3)


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        torch.manual_seed(3)
        self.second = nn.Linear(5, 5)


def filled(blueprint: Blueprint) -> nn.Module:
    """The model of one rank that meets nobody."""
    model = blueprint.take_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    Filler(blueprint, torch.device("cpu"))(model)
    return model


def same(model: nn.Module, other: nn.Module) -> bool:
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], value) for name, value in expected.items()
    )


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("make_model", [Odd, Seeded])
def test_a_factory_recorded_has_the_bits_and_leaves_the_generator_as_it_does_itself(
    alone, make_model
):
    torch.manual_seed(SEED)
    expected = make_model()
    left = torch.get_rng_state()
    blueprint = Blueprint(make_model, SEED)
    assert blueprint.why_whole is None
    model = filled(blueprint)
    assert torch.equal(torch.get_rng_state(), left)
    assert same(model, expected)
    if isinstance(expected, Odd):
        assert torch.equal(model.mask, expected.mask)
        assert torch.equal(model.table, expected.table)
        assert model.tied.weight is model.words.weight
        assert model.rates == expected.rates


def looks() -> nn.Module:
    model = nn.Linear(4, 4)
    if model.weight.sum() > 0:
        nn.init.zeros_(model.weight)
    return model


def lists() -> nn.Module:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.bias, model.weight.tolist()[0][0])
    return model


def forks() -> nn.Module:
    first = nn.Linear(4, 4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        second = nn.Linear(4, 4)
    return nn.Sequential(first, second, nn.Linear(4, 4))


KEPT: list[torch.Tensor] = []


def hides() -> nn.Module:
    model = nn.Linear(4, 4)
    KEPT.append(model.weight.detach())
    return model


def draws_by_itself() -> nn.Module:
    model = nn.Linear(4, 4)
    generator = torch.Generator().manual_seed(7)
    nn.init.normal_(model.weight, generator=generator)
    return model


@pytest.mark.parametrize(
    ("make_model", "why"),
    [
        (looks, "looks at a value that is drawn at random"),
        (lists, ""),
        (forks, "reads the state of torch's generator after drawing"),
        (hides, "keeps a tensor where it is not found: in no module"),
        (draws_by_itself, "draws with a generator of its own into a parameter"),
    ],
)
def test_a_factory_that_cannot_be_recorded_is_built_whole_and_says_why(alone, make_model, why):
    torch.manual_seed(SEED)
    expected = make_model()
    blueprint = Blueprint(make_model, SEED)
    assert blueprint.why_whole is not None
    assert why in blueprint.why_whole
    assert same(filled(blueprint), expected)
    KEPT.clear()


def draws_elsewhere() -> nn.Module:
    model = nn.Linear(4, 2)
    model.scale = random.random()
    model.weight.data.copy_(torch.from_numpy(np.random.rand(2, 4)))
    return model


@pytest.mark.parametrize("looks_first", [False, True])
def test_numpys_and_pythons_draws_in_a_factory_are_those_of_the_seed(alone, looks_first):
    def make_model() -> nn.Module:
        model = draws_elsewhere()
        if looks_first:  # then it is built whole
            float(nn.Linear(1, 1).weight.sum())
        return model

    np.random.seed(1)  # each rank has its own history
    random.seed(1)
    first = Blueprint(make_model, SEED)
    assert (first.why_whole is not None) == looks_first
    models = [filled(first), filled(Blueprint(make_model, SEED))]
    assert models[0].scale == models[1].scale
    assert same(*models)
    assert models[0].weight.std() > 0


def test_why_whole_names_what_a_plan_has_to_know():
    assert why_whole(Odd) is None
    assert why_whole(looks) == "looks at a value that is drawn at random"


def test_a_factory_that_fails_fails_as_it_does_itself():
    def fails() -> nn.Module:
        nn.Linear(4, 4)
        raise ValueError("no heads")

    with pytest.raises(ValueError, match="no heads"):
        Blueprint(fails, SEED)


@pytest.mark.parametrize("shape", [(1000, 7), (33, 5, 16), (3, 3, 160), (2, 2000), (97,), (5, 31)])
def test_numbers_drawn_in_blocks_are_those_drawn_at_once(monkeypatch, shape):
    monkeypatch.setattr(program, "BLOCK", 96)
    for draw in (torch.Tensor.normal_, torch.Tensor.uniform_):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.manual_seed(SEED)
            whole = draw(torch.empty(shape, dtype=dtype))
            torch.manual_seed(SEED)
            blocks = [draw(torch.empty(size, dtype=dtype)) for _, size in program.blocks(shape)]
            assert torch.equal(torch.cat([block.reshape(-1) for block in blocks]), whole.flatten())


def count_draws(monkeypatch) -> list[int]:
    """Numbers that programs draw from here on."""
    drawn: list[int] = []
    run = program.Program.run

    def counted(self: program.Program, targets: Any, *, draws: bool = True) -> None:
        drawn.append(sum(op.is_random for op in self.operations) if draws else 0)
        run(self, targets, draws=draws)

    monkeypatch.setattr(program.Program, "run", counted)
    return drawn


def test_a_survivor_neither_calls_its_factory_nor_draws_and_keeps_its_memory(alone, monkeypatch):
    called: list[int] = []

    def make_model() -> nn.Module:
        called.append(1)
        return Decoder(equality.SHAPE, equality.SEQ_LEN)

    blueprints = Blueprints()
    live = filled(blueprints.of(make_model, SEED, 1))
    lie_at = {name: each.data_ptr() for name, each in live.named_parameters()}
    drawn = count_draws(monkeypatch)
    later = blueprints.of(make_model, SEED, 2)
    model = later.take_model()
    Filler(later, torch.device("cpu"), live=live, draws=False)(model)
    assert model is not live
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == lie_at
    assert len(called) == 1
    assert sum(drawn) == 0


def test_two_models_of_one_training_function_are_built_by_their_own_factories():
    blueprints = Blueprints()
    for generation in (1, 2, 3):
        first = blueprints.of(lambda: nn.Linear(3, 3), SEED, generation).take_model()
        second = blueprints.of(lambda: nn.Linear(5, 5), SEED, generation).take_model()
        assert (first.weight.shape, second.weight.shape) == ((3, 3), (5, 5)), generation


def test_a_model_whose_functions_hold_it_is_not_copied():
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.call = lambda hidden: self.linear(hidden)

    blueprint = Blueprint(Held, SEED)
    assert blueprint.has_model
    blueprint.take_model()
    assert not blueprint.has_model


def differ(rank: int, world: int) -> Any:
    def make_model() -> nn.Module:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.bias, rank)  # as a factory that draws with Python's own random
        return model

    layout = Layout(data=2, sharding="none", micro_batch=1, accumulation=1)
    blueprint = Blueprint(make_model, SEED)
    model = strategy.apply(
        blueprint.take_model(),
        layout,
        strategy.make_meshes(layout, "cpu"),
        precision="fp32",
        fill=Filler(blueprint, torch.device("cpu")),
    )
    return {name: each.detach().numpy().copy() for name, each in model.named_parameters()}


def test_ranks_whose_factories_differ_begin_with_the_first_ranks_numbers():
    first, second = run_ranks(differ, 2)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert np.array_equal(value, second[name])
    assert not first["module.bias"].any()

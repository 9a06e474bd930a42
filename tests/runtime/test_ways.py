"""How a kind of model may be split: what is known, what is read from structure, what is refused."""

import pytest
import torch
from tests.runtime.tensor_models import FAMILIES, tiny
from tests.runtime.tiny import build, fake_rank, layout_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PlanError
from paceline.profile.ways import OWN, Ways
from paceline.runtime.strategy.ways.find import ways_of
from paceline.runtime.strategy.ways.generic import generic_ways
from paceline.runtime.strategy.ways.ways import block_modules, named_ways

PLAIN = Ways(blocks="blocks", first=("embedding",), last=("head",))


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(8), Attention(), Mlp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)


def test_the_built_in_decoder_is_known():
    with torch.device("meta"):
        assert ways_of(tiny("own")) is OWN


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_a_familys_ways_name_is_in_the_model(family: str):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = tiny(family)
    ways = ways_of(model)
    assert ways is not None
    names = set(named_ways(model, ways))
    for pattern in ways.tensor:
        inside = pattern.removeprefix("*")
        assert any(name == pattern or name.endswith(inside) for name in names), pattern
    for name in (ways.blocks, ways.first[0], *ways.last[:1]):
        model.get_submodule(name)


def test_what_a_model_carries_is_used_first():
    model = Model()
    model.paceline_ways = PLAIN
    assert ways_of(model) is PLAIN


def test_a_survivor_finds_the_ways_of_its_model_inside_ddp():
    model = Model()
    model.paceline_ways = PLAIN
    layout = layout_of(2, "none")
    with fake_rank(layout, 0):
        live, _ = build(layout)
        assert ways_of(live) is OWN
        assert ways_of(DistributedDataParallel(model)) is PLAIN


def test_nothing_is_known_of_a_model_of_ones_own():
    assert ways_of(Model()) is None


def test_an_unknown_way_is_refused_with_those_there_are():
    with pytest.raises(PlanError, match=r"diagonal, which is no way to split"):
        Ways(blocks="blocks", first=(), last=(), tensor={"*.a": "diagonal"})


def test_a_star_stands_for_every_block_that_is_here():
    model = Model()
    model.blocks[0] = nn.Identity()  # another stage's
    ways = Ways(blocks="blocks", first=(), last=(), tensor={"*.mlp.fc1": "column", "head": "head"})
    assert named_ways(model, ways) == {"blocks.1.mlp.fc1": "column", "head": "head"}
    assert [name for name, _ in block_modules(model, ways)] == ["blocks.1"]


def test_structure_alone_gives_the_ways_of_a_plain_decoder():
    ways = generic_ways(Model())
    assert ways.blocks == "blocks"
    assert ways.attention == "attention"
    assert ways.first == ("embedding",)
    assert ways.last == ("norm", "head")
    assert ways.tensor == {
        "*.attention.wq": "column",
        "*.attention.wk": "column",
        "*.attention.wv": "column",
        "*.attention.wo": "row",
        "*.mlp.fc1": "column",
        "*.mlp.fc2": "row",
        "embedding": "embedding",
        "head": "head",
    }


def test_structure_alone_gives_what_is_known_of_llama():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = tiny("llama")
    known = ways_of(model)
    assert known is not None
    assert generic_ways(model) == known


def test_a_linear_that_cannot_be_placed_is_named():
    model = Model()
    model.blocks[0].attention.mixer = nn.Linear(8, 8)
    with pytest.raises(PlanError, match=r"blocks\.0\.attention has linears wq, wk, wv, wo, mixer"):
        generic_ways(model)


def test_stages_need_no_place_for_every_linear():
    model = Model()
    model.blocks[0].attention.mixer = nn.Linear(8, 8)
    ways = generic_ways(model, splits_tensors=False)
    assert (ways.blocks, ways.first, ways.last) == ("blocks", ("embedding",), ("norm", "head"))
    assert ways.tensor == {}


@pytest.mark.parametrize(("splits_tensors", "axis"), [(True, "tensor"), (False, "pipeline")])
def test_a_model_without_blocks_says_so_at_the_axis_that_is_asked_for(splits_tensors, axis):
    with pytest.raises(PlanError, match="Linear has no list of equal blocks") as refused:
        generic_ways(nn.Linear(2, 2), splits_tensors=splits_tensors)
    assert refused.value.problems[0].where == f"layout.{axis}"

"""A model split over tensor ranks gives what it gives on one: the loss and every gradient.

Compared in float64, where another order of summing shows at 1e-15 and a mistake at 1e-2.
"""

import copy
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.runtime.tensor_models import (
    FAMILIES,
    OWN,
    SEQ_LEN,
    VOCAB,
    compute_in_float64,
    logits_of,
    tiny,
)
from tests.runtime.tiny import fake_rank
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.profile.ways import HUGGING_FACE, Ways
from paceline.runtime.decoder import Decoder
from paceline.runtime.strategy.mesh import make_meshes
from paceline.runtime.strategy.tensor.fused import split_fused
from paceline.runtime.strategy.tensor.rules import check_tensor_ways
from paceline.runtime.strategy.tensor.split import loss_context, split_tensors
from paceline.runtime.strategy.ways.find import ways_of

SAMPLES = 2

FLOAT64_BOUND = 1e-12
"""Of the largest gradient. A gradient here sums at most 32 tokens x 64 features x 8 products, each
rounded to 1.1e-16: 2e-12 if all errors added up, 1e-14 if they are random. Measured: 2e-15."""


def layout_of(tensor: int, *, data: int = 1, sequence_parallel: bool = True) -> Layout:
    return Layout(
        data=data,
        sharding="full" if data > 1 else "none",
        micro_batch=SAMPLES // data,
        accumulation=1,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (SAMPLES, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def built(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return tiny(kind).to(dtype).train()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model: nn.Module, layout: Layout, part: slice) -> Tensor:
    """Loss of some of the samples, over the tokens of all; its gradients are in the model."""
    inputs_BS, targets_BS = batch()
    with loss_context(layout):
        logits_BSV = logits_of(model, inputs_BS[part])
        losses = F.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS[part].flatten(), reduction="sum"
        )
        loss = losses / targets_BS.numel()
        loss.backward()
    return whole(loss.detach())


def deviations(model: nn.Module, expected: nn.Module) -> float:
    """Largest difference of a gradient, as a share of the largest gradient. Collective."""
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    names = [name for name, _ in model.named_parameters()]
    assert names == list(gradients)
    worst = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        difference = float((whole(parameter.grad) - gradients[name]).abs().max()) / largest
        assert difference == difference, name
        worst = max(worst, difference)
    return worst


def compare(kind: str, layout: Layout, rank: int, dtype: torch.dtype) -> tuple[float, float]:
    """Differences of the loss and of the gradients from those of one rank."""
    expected, model = built(kind, dtype), built(kind, dtype)
    ways = ways_of(model)
    assert ways is not None, kind
    split_fused(expected, ways)
    meshes = make_meshes(layout, "cpu")
    model = split_tensors(model, layout, meshes, ways)
    part = slice(0, SAMPLES)
    if layout.data > 1:
        for block in model.get_submodule(ways.blocks).children():
            fully_shard(block, mesh=meshes.fsdp).set_gradient_divide_factor(1.0)
        fully_shard(model, mesh=meshes.fsdp).set_gradient_divide_factor(1.0)
        share = SAMPLES // layout.data
        part = slice(meshes.place.data * share, (meshes.place.data + 1) * share)
    loss = backward(model, layout, part)
    if layout.data > 1:
        dist.all_reduce(loss, group=meshes.data)
    expected_loss = backward(expected, layout_of(1), slice(0, SAMPLES))
    return float((loss - expected_loss).abs()), deviations(model, expected)


def compare_kinds(rank: int, world: int, kinds: tuple[str, ...], data: int) -> dict[str, Any]:
    compute_in_float64()
    results = {}
    for kind in kinds:
        for sequence_parallel in (True, False):
            layout = layout_of(world // data, data=data, sequence_parallel=sequence_parallel)
            results[kind, sequence_parallel] = compare(kind, layout, rank, torch.float64)
    return results


def assert_equal(kinds: tuple[str, ...], world: int, data: int = 1) -> None:
    for results in run_ranks(compare_kinds, world, kinds, data):
        wrong = {case: found for case, found in results.items() if max(found) > FLOAT64_BOUND}
        assert not wrong
        assert len(results) == 2 * len(kinds)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_the_decoder_split_over_tensors_has_one_ranks_loss_and_gradients(world: int):
    assert_equal(OWN, world)


@pytest.mark.slow  # the quick one has a family of each kind of split, on four ranks
@pytest.mark.ranks
def test_every_known_family_split_over_tensors_has_one_ranks_loss_and_gradients():
    pytest.importorskip("transformers")
    assert_equal(FAMILIES, 2)


@pytest.mark.ranks
@pytest.mark.repeat  # every family is split over two above
def test_each_kind_of_split_holds_on_four_ranks():
    pytest.importorskip("transformers")
    assert_equal(("falcon", "gpt2", "llama", "mixtral", "olmo2", "opt", "phi3", "qwen2_moe"), 4)


@pytest.mark.ranks
def test_tensors_split_and_then_sharded_by_fsdp2_have_one_ranks_loss_and_gradients():
    pytest.importorskip("transformers")
    assert_equal((*OWN, "gpt2", "mixtral", "phi3"), 4, data=2)


@pytest.mark.ranks
def test_a_stage_takes_and_gives_whole_hidden_states():
    for output, gradients in run_ranks(middle_stage, 2):
        assert output < FLOAT64_BOUND
        assert gradients < FLOAT64_BOUND


def middle_stage(rank: int, world: int) -> tuple[float, float]:
    """Differences of what the blocks alone give, and of their gradients and their input's."""
    compute_in_float64()
    expected, model = built("own", torch.float64), built("own", torch.float64)
    layout = layout_of(world)
    ways = ways_of(model)
    assert ways is not None
    for whole_model in (expected, model):
        for name in ("embedding", "norm", "output"):
            setattr(whole_model, name, nn.Identity())
    split_tensors(model, layout, make_meshes(layout, "cpu"), ways)
    hidden_BSH = torch.randn(SAMPLES, SEQ_LEN, 32, dtype=torch.float64)
    inputs = [hidden_BSH.clone().requires_grad_() for _ in range(2)]
    outputs = [whole_model(own) for whole_model, own in zip((expected, model), inputs, strict=True)]
    weights_BSH = torch.randn_like(hidden_BSH)
    for output in outputs:
        (output * weights_BSH).sum().backward()
    gradients = [own.grad for own in inputs]
    assert gradients[0] is not None
    assert gradients[1] is not None
    to_input = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    outputs = [output.detach() for output in outputs]
    difference = float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())
    return difference, max(to_input, deviations(model, expected))


@pytest.mark.ranks
def test_dropout_computed_again_in_the_backward_pass_is_the_same_dropout():
    """The gradients with each block recomputed, less those without: none, with the same masks."""
    pytest.importorskip("transformers")
    for difference in run_ranks(recompute_dropout, 2):
        assert difference == 0


def recompute_dropout(rank: int, world: int) -> float:
    worst = 0.0
    for sequence_parallel in (True, False):
        layout = layout_of(world, sequence_parallel=sequence_parallel)
        meshes = make_meshes(layout, "cpu")
        gradients = []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
            split_tensors(model, layout, meshes, HUGGING_FACE["gpt2"])
            for block in model.get_submodule("transformer.h").children() if recompute else ():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            torch.manual_seed(7)
            backward(model, layout, slice(0, SAMPLES))
            gradients.append([whole(parameter.grad) for parameter in model.parameters()])
        for without, with_recompute in zip(*gradients, strict=True):
            worst = max(worst, float((without - with_recompute).abs().max()))
    return worst


@pytest.mark.ranks
def test_in_float32_the_split_differs_by_no_more_than_the_order_of_the_sums():
    """A gradient sums at most n = 32 tokens x 64 features; its rounding errors, were all alike,
    would add up to n times the unit 2^-24, through 2 x 7 matrices forward and backward."""
    bound = 14 * 32 * 64 * 2**-24
    for loss, gradients in run_ranks(compare_in_float32, 2):
        assert loss < 64 * 2**-24 * 14
        assert gradients < bound


def compare_in_float32(rank: int, world: int) -> tuple[float, float]:
    return compare("own", layout_of(world), rank, torch.float32)


@pytest.mark.ranks
def test_without_sequence_parallelism_all_ranks_have_the_same_dropout_outside_of_the_matrices():
    pytest.importorskip("transformers")
    first, second = run_ranks(drop, 2, False)
    assert torch.equal(first["hidden"], second["hidden"])
    assert torch.equal(first["after attention"], second["after attention"])
    assert not torch.equal(first["in attention"], second["in attention"])
    assert torch.equal(first["next number"], second["next number"])


@pytest.mark.ranks
def test_with_sequence_parallelism_each_rank_drops_other_tokens():
    pytest.importorskip("transformers")
    first, second = run_ranks(drop, 2, True)
    assert torch.equal(first["embedding"], second["embedding"])
    assert not torch.equal(first["after attention"], second["after attention"])
    assert not torch.equal(first["in attention"], second["in attention"])
    assert torch.equal(first["next number"], second["next number"])


def drop(rank: int, world: int, sequence_parallel: bool) -> dict[str, Tensor]:
    """What GPT-2 drops in its parts: 1 where a number was kept, from all tokens alike."""
    torch.manual_seed(0)
    model = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    layout = layout_of(world, sequence_parallel=sequence_parallel)
    split_tensors(model, layout, make_meshes(layout, "cpu"), HUGGING_FACE["gpt2"])
    seen: dict[str, Tensor] = {}
    block = model.get_submodule("transformer.h.1")
    for name, module in {
        "embedding": model.get_submodule("transformer.drop"),
        "after attention": block.get_submodule("attn.resid_dropout"),
    }.items():
        module.register_forward_hook(_Note(seen, name))
    # A head's output is zero where the weights of all that a token looks back on are dropped.
    mixed = block.get_submodule("attn.c_proj")
    mixed.register_forward_pre_hook(lambda _, args: seen.update({"in attention": args[0] != 0}))
    block.register_forward_hook(lambda module, args, output: seen.update(hidden=_first(output)))
    torch.manual_seed(7)
    backward(model, layout, slice(0, SAMPLES))
    return {**seen, "next number": torch.rand(3)}


class _Note:
    def __init__(self, seen: dict[str, Tensor], name: str) -> None:
        self.seen, self.name = seen, name

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen[self.name] = (output != 0).detach()


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.detach()


@pytest.mark.ranks
def test_llama_3_8b_is_split_on_a_pretended_world_of_64_ranks():
    (result,) = run_ranks(split_8b, 1)
    assert result["parameters"] == 8_030_261_248
    assert result["local"] == pytest.approx(8_030_261_248 / 8, rel=1e-3)
    assert result["logits"] == (1, 64, 128256)
    assert result["local logits"] == (1, 64, 128256 // 8)


def split_8b(rank: int, world: int) -> dict[str, Any]:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    shape = DecoderShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocab=128256,
        tied_embeddings=False,
    )
    with torch.device("meta"):
        model = Decoder(shape, 64)
    layout = Layout(data=8, sharding="full", micro_batch=1, accumulation=1, tensor=8)
    ways = ways_of(model)
    assert ways is not None
    meshes = make_meshes(layout, "cpu")
    split_tensors(model, layout, meshes, ways)
    parameters = list(model.parameters())
    sizes = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "local": sum(parameter.to_local().numel() for parameter in parameters),
    }
    for block in model.blocks:
        fully_shard(block, mesh=meshes.fsdp)
    fully_shard(model, mesh=meshes.fsdp)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens_BS = torch.zeros(1, 64, dtype=torch.int64)
        with loss_context(layout):
            logits_BSV = model(tokens_BS)
            F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.flatten()).backward()
        shapes = {
            "logits": tuple(logits_BSV.shape),
            "local logits": tuple(logits_BSV.to_local().shape),
        }
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file:///tmp/after-{os.getpid()}", rank=0, world_size=1
    )
    return {**sizes, **shapes}


def problems_of(model: nn.Module, tensor: int, ways: Ways | None = None) -> list[Any]:
    ways = ways or ways_of(model)
    assert ways is not None
    return list(check_tensor_ways(model, layout_of(tensor), ways))


def test_a_degree_that_does_not_divide_the_key_and_value_heads_names_the_module():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = tiny("llama", num_key_value_heads=2)
    problems = problems_of(model, 4)
    assert [problem.code for problem in problems] == ["L005", "L005"]
    assert problems[0].what == "model.layers.0.self_attn.k_proj has 2 key/value heads, tensor is 4"


def test_a_fused_linear_is_refused_by_the_heads_of_its_narrowest_part():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = tiny("phi3", num_key_value_heads=2)
    what = [problem.what for problem in problems_of(model, 4)]
    assert "model.layers.0.self_attn.qkv_proj has 2 key/value heads, tensor is 4" in what


def test_a_feed_forward_that_does_not_divide_is_named():
    with torch.device("meta"):
        model = tiny("own")
    problems = problems_of(model, 128)
    assert "blocks.0.ffn.gate has 64 output features, tensor is 128" in [p.what for p in problems]


def test_a_model_nothing_is_known_of_says_so():
    (problem,) = problems_of(nn.Linear(2, 2), 2, Ways(blocks="", first=(), last=()))
    assert problem.code == "L020"
    assert "how Linear may be split is not known" in problem.what


def test_a_norm_with_weights_of_its_own_for_each_head_is_refused():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = tiny("stablelm", qk_layernorm=True)
    (problem,) = problems_of(model, 2)
    assert problem.code == "L020"


def test_attention_that_would_see_a_share_of_the_tokens_is_refused():
    with torch.device("meta"):
        model = tiny("own")
    known = ways_of(model)
    assert known is not None
    feed_forward = {name: way for name, way in known.tensor.items() if ".attention." not in name}
    (problem,) = problems_of(model, 2, replace(known, tensor=feed_forward))
    assert "attention would see only a rank's share of the tokens" in problem.what
    without = check_tensor_ways(
        model, layout_of(2, sequence_parallel=False), replace(known, tensor=feed_forward)
    )
    assert not list(without)


@pytest.mark.ranks
def test_tokens_that_the_ranks_cannot_share_are_refused():
    for message in run_ranks(split_odd_tokens, 2):
        assert message.startswith("L021: a sample has 15 tokens")


def split_odd_tokens(rank: int, world: int) -> str:
    layout = layout_of(world)
    model = tiny("own")
    ways = ways_of(model)
    assert ways is not None
    split_tensors(model, layout, make_meshes(layout, "cpu"), ways)
    with pytest.raises(Exception, match="L021") as caught:
        model(torch.zeros(1, 15, dtype=torch.int64))
    return str(caught.value)


@pytest.mark.ranks
def test_a_degree_that_does_not_divide_stops_before_anything_is_changed():
    assert all(run_ranks(split_three_ways, 3))


def split_three_ways(rank: int, world: int) -> bool:
    layout = layout_of(world)
    model = tiny("own")
    before = copy.deepcopy(dict(model.named_parameters()))
    ways = ways_of(model)
    assert ways is not None
    with pytest.raises(PlanError, match="L005"):
        split_tensors(model, layout, make_meshes(layout, "cpu"), ways)
    after = dict(model.named_parameters())
    return all(torch.equal(after[name], value) for name, value in before.items())


class _Fused(nn.Module):
    """A block whose attention has one linear for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].attention = nn.Module()
        self.blocks[0].attention.qkv = nn.Linear(8, 24)
        self.blocks[0].attention.out = nn.Linear(8, 8)
        self.blocks[0].attention.heads = 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fused": {"*.attention.qkv": ("query",)}}, "1 part is named"),
        ({"fused": {"*.attention.qkv": tuple("abcdefg")}}, "24 features are not 7 parts"),
        ({"tensor": {"*.attention.qkv": "column"}}, "has 0"),
        ({"divided": {"*.attention": ("num_heads",)}}, "has no whole number `num_heads`"),
    ],
)
def test_a_slip_in_ways_is_told_with_its_name(changed, said):
    sound = {
        "tensor": {"*.attention.qkv": "column", "*.attention.out": "row"},
        "fused": {"*.attention.qkv": ("query", "key", "value")},
        "divided": {"*.attention": ("heads",)},
    }
    ways = Ways(blocks="blocks", first=(), last=(), attention="attention", **(sound | changed))
    layout = layout_of(2, sequence_parallel=False)
    with fake_rank(layout, 0), pytest.raises(PlanError, match=said) as refused:
        split_tensors(_Fused(), layout, make_meshes(layout, "cpu"), ways)
    assert refused.value.problems[0].code == "L020"

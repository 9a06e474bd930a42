import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.tiny import (
    GLOBAL_BATCH,
    SEQ_LEN,
    build,
    fake_rank,
    layout_of,
    train_steps,
)
from torch import nn

from paceline.runtime import strategy
from paceline.runtime.digest import state_digest

STEPS = range(3)

REORDERED = GLOBAL_BATCH * SEQ_LEN * 2**-24
"""Relative error of summing the 128 token losses of a batch in another order, at worst: n x u,
with float32's u = 2^-24 (Higham, Accuracy and Stability, section 4.2)."""

NARROW = 4 * 2**-8
"""A few roundings to bfloat16, u = 2^-8, of activations that the loss is about linear in."""

WAYS = {
    "DDP": ("none", 1, False, "fp32"),
    "DDP accumulating": ("none", 2, False, "fp32"),
    "FSDP2": ("full", 1, False, "fp32"),
    "FSDP2 accumulating": ("full", 2, False, "fp32"),
    "FSDP2 reducing each time": ("full", 2, True, "fp32"),
    "DDP in bf16": ("none", 1, False, "bf16"),
    "FSDP2 in bf16": ("full", 1, False, "bf16"),
}


def train_every_way(rank, world):
    results = {}
    for name, (sharding, accumulation, every, precision) in WAYS.items():
        layout = layout_of(world, sharding, accumulation, every=every)
        model, optimizer = build(layout, precision=precision)
        results[name] = train_steps(model, optimizer, layout, rank, STEPS, precision=precision)
    return results


@pytest.fixture
def one_rank():
    layout = layout_of(1, "none")
    with fake_rank(layout, 0):
        yield strategy.make_meshes(layout, "cpu")


@pytest.fixture(scope="module")
def alone():
    """Losses and norms of one process, for each way."""
    (result,) = run_ranks(train_every_way, 1)
    return result


@pytest.fixture(scope="module")
def together():
    """The same from two ranks."""
    first, second = run_ranks(train_every_way, 2)
    assert first == second
    return first


@pytest.mark.ranks
@pytest.mark.parametrize("way", [way for way in WAYS if "bf16" not in way])
def test_two_ranks_train_to_the_losses_of_one_process(way, alone, together):
    assert together[way][0] == pytest.approx(alone["DDP"][0], rel=REORDERED)


@pytest.mark.ranks
@pytest.mark.parametrize("way", [way for way in WAYS if "bf16" not in way])
def test_the_gradient_norm_is_that_of_one_process_however_the_model_is_split(way, alone, together):
    # The norm sums over parameters what the loss sums over tokens; same order of magnitude.
    assert together[way][1] == pytest.approx(alone["DDP"][1], rel=10 * REORDERED)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["DDP in bf16", "FSDP2 in bf16"])
def test_bf16_stays_near_fp32_and_is_not_the_same(way, alone, together):
    assert together[way][0] == pytest.approx(alone["DDP"][0], rel=NARROW)
    assert together[way][0] != pytest.approx(alone["DDP"][0], rel=REORDERED)


@pytest.mark.ranks
def test_bf16_is_applied_on_one_rank_too(alone):
    assert alone["DDP in bf16"][0] != alone["DDP"][0]


def start_from_different_seeds(rank, world, sharding):
    model, optimizer = build(layout_of(world, sharding), seed=rank)
    return state_digest(model, optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_every_rank_starts_from_the_weights_of_rank_0(sharding):
    (expected,) = run_ranks(start_from_different_seeds, 1, "none")
    assert run_ranks(start_from_different_seeds, 2, sharding) == [expected, expected]


def gradients_after_each_micro_batch(rank, world, sharding, every):
    """Norm of this rank's own gradients after each of two micro-batches; None without any."""
    layout = layout_of(world, sharding, accumulation=2, every=every)
    model, _ = build(layout)
    norms = []
    for is_last in (False, True):
        strategy.set_gradient_sync(model, layout, is_last=is_last)
        tokens = torch.full((2, SEQ_LEN), 1 + rank)
        model(tokens).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)) if gradients else None)
    return norms


@pytest.mark.ranks
def test_ddp_reduces_gradients_with_the_last_micro_batch_only():
    (a_first, a_last), (b_first, b_last) = run_ranks(
        gradients_after_each_micro_batch, 2, "none", False
    )
    assert a_first != b_first  # each rank's own
    assert a_last == b_last


@pytest.mark.ranks
@pytest.mark.parametrize("every", [False, True])
def test_fsdp2_holds_a_shard_of_gradients_only_after_it_reduced_them(every):
    for first, last in run_ranks(gradients_after_each_micro_batch, 2, "full", every):
        assert (first is not None) == every
        assert last is not None


class Net(nn.Module):
    """A list of blocks beside something small."""

    def __init__(self, blocks):
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.blocks = blocks


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


def test_the_blocks_of_a_model_are_its_longest_repeated_part():
    model = Net(nn.ModuleList(nn.Linear(64, 64) for _ in range(3)))
    assert strategy.repeated_blocks(model) == list(model.blocks)


def test_experts_inside_a_block_are_not_blocks():
    model = Net(nn.ModuleList(Experts() for _ in range(2)))
    assert strategy.repeated_blocks(model) == list(model.blocks)


def test_both_stacks_of_an_encoder_and_decoder_are_blocks():
    model = nn.ModuleDict(
        {name: Net(nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))) for name in "ab"}
    )
    expected = [block for net in model.values() for block in net.blocks]
    assert strategy.repeated_blocks(model) == expected


def test_a_model_without_repetition_has_no_blocks():
    assert strategy.repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []


def clip_gradients(model: nn.Module, meshes: strategy.Meshes, limit: float) -> float:
    norm = float(strategy.gradient_norm(model, meshes))
    strategy.scale_gradients(model, strategy.clip_factor(norm, limit))
    return norm


def test_gradients_above_the_limit_are_scaled_down_to_it(one_rank: strategy.Meshes):
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    norm = clip_gradients(model, one_rank, 0.25)
    assert norm > 1
    assert float(strategy.gradient_norm(model, one_rank)) == pytest.approx(0.25, rel=1e-6)


def test_gradients_below_the_limit_keep_every_bit(one_rank: strategy.Meshes):
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    clip_gradients(model, one_rank, 1e6)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_makes_the_norm_not_finite(one_rank: strategy.Meshes):
    model = nn.Linear(3, 2)
    model(torch.full((4, 3), float("nan"))).sum().backward()
    assert not torch.isfinite(strategy.gradient_norm(model, one_rank))


def test_a_model_without_gradients_has_norm_zero(one_rank: strategy.Meshes):
    assert float(strategy.gradient_norm(nn.Linear(2, 2), one_rank)) == 0.0

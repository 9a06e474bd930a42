import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from paceline.job import TrainSpec
from paceline.job.train_rules import learning_rate_at
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.optimizer.adafactor import Adafactor
from paceline.runtime.optimizer.adamw_8bit import AdamW8bit, dequantise, quantise
from paceline.runtime.optimizer.muon import Muon, orthogonal

TRAINS = st.builds(
    TrainSpec,
    global_batch=st.just(1),
    steps=st.integers(1, 300),
    warmup_steps=st.integers(0, 400),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    learning_rate=st.floats(1e-6, 10),
    final_learning_rate=st.floats(0, 1),
)


@given(TRAINS)
def test_the_learning_rate_rises_over_the_warm_up_then_only_falls(train):
    rates = [learning_rate_at(step, train) for step in range(1, train.steps + 1)]
    peak = min(max(train.warmup_steps, 1), train.steps) - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    falling = rates[peak:]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(falling))
    assert min(rates) >= 0
    assert max(rates) <= train.learning_rate * (1 + 1e-12)


@given(TRAINS)
def test_the_last_step_has_the_final_learning_rate(train):
    last = learning_rate_at(train.steps, train)
    if train.warmup_steps >= train.steps:
        assert last == pytest.approx(train.learning_rate * train.steps / train.warmup_steps)
    elif train.schedule == "constant":
        assert last == train.learning_rate
    else:
        assert last == pytest.approx(train.learning_rate * train.final_learning_rate, abs=1e-12)


def test_wsd_stays_at_the_peak_until_its_last_steps():
    train = TrainSpec(
        global_batch=1,
        steps=100,
        warmup_steps=10,
        learning_rate=1.0,
        final_learning_rate=0.0,
        schedule="wsd",
        decay_steps=20,
    )
    rates = [round(learning_rate_at(step, train), 3) for step in (10, 50, 80, 81, 90, 100)]
    assert rates == [1.0, 1.0, 1.0, 0.95, 0.5, 0.0]


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit", "muon"])
def test_the_optimizer_has_the_jobs_betas_and_eps(name):
    train = TrainSpec(global_batch=1, steps=1, optimizer=name, betas=(0.8, 0.98), eps=1e-6)
    (group,) = make_optimizer(nn.Sequential(nn.Linear(3, 2, bias=False)), train).param_groups
    assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.98), 1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_decay(name):
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = make_optimizer(
        model, TrainSpec(global_batch=1, steps=1, optimizer=name, weight_decay=0.5)
    )
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {name: decays[p] for name, p in model.named_parameters()} == {
        "0.weight": 0.5,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.5,
        "2.bias": 0.0,
    }


def test_frozen_parameters_are_left_to_themselves():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, TrainSpec(global_batch=1, steps=1))
    assert [p for g in optimizer.param_groups for p in g["params"]] == [model.weight]


@pytest.mark.parametrize("shape", [(0, 512), (0, 3, 300), (4, 0)])
def test_a_shard_without_rows_or_columns_is_quantised_to_nothing(shape):
    codes, largest = quantise(torch.zeros(shape), signed=True)
    assert codes.shape == shape
    assert largest.numel() == 0
    assert dequantise(codes, largest, signed=True).shape == shape


OPTIMIZERS = ("adamw", "sgd", "adamw-8bit", "muon", "adafactor")

WIDTH = 512
"""Of the sharded test's matrices: two tensor ranks have whole blocks of 256 columns each."""


class Wide(nn.Module):
    """A block with two matrices and a list of four."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 24, 64))

    def forward(self, hidden):
        widened = self.down(torch.tanh(self.up(hidden)))
        return hidden + widened + self.experts.square().mean()


class Tower(nn.Module):
    """Two blocks between an embedding and a head, large enough for 8-bit states."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Wide() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tower():
    torch.manual_seed(0)
    return Tower().double()


def train_tower(model, name, num_steps=3):
    train = TrainSpec(global_batch=1, steps=3, optimizer=name, learning_rate=0.01)
    optimizer = make_optimizer(model, train)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 16, (32,), generator=generator)  # the same on every rank
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def largest_difference(rank, world):
    """Between one device's and the sharded model's parameters, by optimizer and layout."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tensor"))
    results = {}
    for name in OPTIMIZERS:
        expected = tower()
        kept = train_tower(expected, name)
        for layout, (fsdp, tensor) in {
            "tensor": (None, mesh["tensor"]),
            "FSDP2": (mesh["fsdp"], None),
            "both": (mesh["fsdp"], mesh["tensor"]),
        }.items():
            model = tower()
            if tensor is not None:
                up = RowwiseParallel(input_layouts=Replicate())
                down = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(model.blocks, tensor, {"*.up": up, "*.down": down})
            if fsdp is not None:
                for block in model.blocks:
                    fully_shard(block, mesh=fsdp)
                fully_shard(model, mesh=fsdp)
            found = train_tower(model, name)
            pairs = zip(expected.parameters(), model.parameters(), strict=True)
            states = compare_states(kept, found, expected, model)
            results[name, layout] = (
                max(float((whole(b.detach()) - a.detach()).abs().max()) for a, b in pairs),
                states,
            )
    return results


def compare_states(kept, found, expected, model):
    """Keys and whole shapes of each parameter's state are one device's."""
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        here = {key: tuple(whole(value.detach()).shape) for key, value in found.state[b].items()}
        there = {key: tuple(value.shape) for key, value in kept.state[a].items()}
        if here != there:
            return f"{here} {there}"
    return None


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(largest_difference, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["tensor", "FSDP2", "both"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_parameters_step_as_on_one_device(name, layout, sharded):
    for results in sharded:
        difference, states = results[name, layout]
        assert difference < 1e-10  # float64, and updates of about 0.01
        assert states is None


def small(shape=(6, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    return parameter, [
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)
    ]


def steps_of(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(6, 4), (5,), (3, 6, 4)])
def test_adafactor_is_torchs_where_nothing_is_sharded(shape):
    (ours, gradients), (theirs, _) = small(shape), small(shape)
    found = steps_of(Adafactor([ours], lr=0.1, weight_decay=0.1), ours, gradients)
    reference = torch.optim.Adafactor([theirs], lr=0.1, weight_decay=0.1, foreach=False)
    torch.testing.assert_close(found, steps_of(reference, theirs, gradients))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_torchs_up_to_the_type_of_its_products(shape):
    (ours, gradients), (theirs, _) = small(shape), small(shape)
    group = {"params": [ours], "is_hidden": True, "weight_decay": 0.1}
    found = steps_of(Muon([group], lr=0.1, betas=(0.9, 0.95)), ours, gradients)
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    # torch's products are in bfloat16: five rounds of three products, u = 2^-8, on a step of 0.05.
    expected = steps_of(reference, theirs, gradients)
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * 0.05 * 15 * 2**-8)


def test_muon_makes_the_rows_of_every_expert_orthogonal():
    experts = torch.randn(3, 4, 16, dtype=torch.float64)
    singular = torch.linalg.svdvals(orthogonal(experts))
    assert ((singular > 0.5) & (singular < 1.5)).all()  # Jordan et al.: 0.7 to 1.2, about


def test_muon_moves_the_matrices_of_blocks_and_adamw_the_rest():
    model = tower()
    optimizer = train_tower(model, "muon", num_steps=1)
    with_momentum = {
        name
        for name, parameter in model.named_parameters()
        if "momentum_buffer" in optimizer.state[parameter]
    }
    assert with_momentum == {
        f"blocks.{index}.{name}"
        for index in (0, 1)
        for name in ("up.weight", "down.weight", "experts")
    }


def test_muons_other_parameters_step_as_torchs_adamw():
    (ours, gradients), (theirs, _) = small((5,)), small((5,))
    group = {"params": [ours], "is_hidden": False, "weight_decay": 0.1}
    found = steps_of(Muon([group], lr=0.1, betas=(0.9, 0.95)), ours, gradients)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(found, steps_of(reference, theirs, gradients))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_a_byte_stand_for_numbers_near_those_they_were_made_from(signed):
    values = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    codes, largest = quantise(values, signed=signed)
    assert codes.dtype == torch.uint8
    assert largest.shape == (5, 3)  # 256 + 256 + 188 in each row
    back = dequantise(codes, largest, signed=signed)
    scale = largest.repeat_interleave(256, -1)[:, :700]
    # The coarsest codes, above a tenth of the largest: 64 (or 128) between 0.1 and 1.
    assert ((back - values).abs() / scale).max() <= 0.9 / (64 if signed else 128) / 2 * 1.01


def test_8_bit_adamw_holds_two_bytes_a_number_and_moves_nearly_as_adamw():
    (ours, gradients), (theirs, _) = small((64, 512)), small((64, 512))
    optimizer = AdamW8bit([ours], lr=0.01, betas=(0.9, 0.95))
    start = ours.detach().clone()
    found = steps_of(optimizer, ours, gradients)
    state = optimizer.state[ours]
    num_bytes = sum(value.nbytes for key, value in state.items() if key != "step")
    assert num_bytes / ours.numel() == pytest.approx(2 + 2 * 4 / 256)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    expected = steps_of(reference, theirs, gradients)
    assert (found - expected).norm() < 0.05 * (expected - start).norm()


def go_on_from_whole_states(rank, world):
    """Steps after states were replaced by whole tensors, as a checkpoint of another layout loads
    those that have not their parameter's shape."""
    mesh = init_device_mesh("cpu", (world,))
    differences = []
    for name in ("adamw-8bit", "adafactor"):
        (ours, gradients), (theirs, _) = small((64, 512)), small((64, 512))
        sharded = nn.Parameter(distribute_tensor(ours.detach(), mesh, [Shard(0)]))
        train = TrainSpec(global_batch=1, steps=3, optimizer=name)
        found = make_optimizer(nn.ParameterList([sharded]), train)
        expected = make_optimizer(nn.ParameterList([theirs]), train)
        for gradient in gradients:
            sharded.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            theirs.grad = gradient
            found.step()
            expected.step()
            for key, value in found.state[sharded].items():
                if value.shape != sharded.shape:
                    found.state[sharded][key] = whole(value).clone()
        differences.append(float((whole(sharded.detach()) - theirs.detach()).abs().max()))
    return differences


@pytest.mark.ranks
def test_states_that_were_loaded_whole_are_laid_out_at_the_next_step():
    for differences in run_ranks(go_on_from_whole_states, 2):
        assert max(differences) < 1e-12

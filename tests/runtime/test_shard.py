"""Every sharding gives the gradients and steps of one device, and holds what it says it holds."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.runtime.tiny import GLOBAL_BATCH, SEQ_LEN, SHAPE, fake_rank
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_all_reduce, check_offload_of
from paceline.runtime.decoder import Decoder
from paceline.runtime.sampling import rank_slots
from paceline.runtime.strategy.apply import apply
from paceline.runtime.strategy.compiling import compile_blocks
from paceline.runtime.strategy.data.replica import Replica
from paceline.runtime.strategy.data.shard import (
    even_placement,
    finish_gradients,
    loss_factor,
    set_gradient_sync,
    shard,
)
from paceline.runtime.strategy.mesh import make_meshes
from paceline.runtime.strategy.precision import LossScaler, autocast
from paceline.runtime.strategy.recompute import recompute_blocks
from paceline.runtime.strategy.train import forward_backward

NUM_STEPS = 3
NUM_TOKENS = GLOBAL_BATCH * SEQ_LEN

REORDERED = NUM_TOKENS * 2**-53
"""Relative error of a sum over the 128 tokens of a batch in another order: n x u, with float64's
u = 2^-53 (Higham, Accuracy and Stability, section 4.2)."""

AFTER_STEPS = 1e-9
"""Largest difference of a parameter after three steps. AdamW divides by the gradient's own size, so
a relative error e of a gradient moves its parameter by about 2 x lr x e in a step. A gradient entry
that is small beside the terms it is the sum of has a relative error of up to their ratio times
`REORDERED`: 1e-9 allows a ratio of 1e7 at lr = 3e-3."""

DATA = {
    "DDP": ("none", False),
    "ZeRO-1": ("zero1", False),
    "ZeRO-2": ("zero2", False),
    "FSDP2": ("full", False),
    "FSDP2 reducing each time": ("full", True),
}
CASES = {
    f"{name}, recompute {recompute}": (sharding, every, recompute, 2)
    for (name, (sharding, every)), recompute in itertools.product(
        DATA.items(), ("none", "selective", "full")
    )
} | {"DDP, one micro-batch": ("none", False, "none", 1), "ZeRO-1, one": ("zero1", False, "none", 1)}


def layout_of(world, sharding, every=False, recompute="none", accumulation=2, **more):
    data = world // more.get("tensor", 1)
    return Layout(
        data=data,
        sharding=sharding,
        micro_batch=GLOBAL_BATCH // data // accumulation,
        accumulation=accumulation,
        reduce_every_micro_batch=every,
        recompute=recompute,
        **more,
    )


def decoder():
    torch.manual_seed(0)
    return Decoder(SHAPE, SEQ_LEN).double()


def loss_of(model, layout, batch):
    """A micro-batch's share of the mean over the global batch's tokens."""
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return total / NUM_TOKENS * loss_factor(layout, model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named(model):
    inner = model.module if isinstance(model, Replica) else model
    return dict(inner.named_parameters())


def train(model, layout, data_rank):
    """Gradients of the first step and parameters after the last, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    gradients = {}
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        slots = rank_slots(layout, data_rank)
        for index, part in enumerate(slots):
            set_gradient_sync(model, layout, is_last=index == len(slots) - 1)
            loss_of(model, layout, tokens[part.start : part.stop]).backward()
        finish_gradients(model)
        if step == 0:
            gradients = {n: whole(p.grad).clone() for n, p in named(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {n: whole(p.detach()).clone() for n, p in named(model).items()}


def deviation(found, expected):
    """Largest difference as a share of the tensor's largest entry, over all tensors."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected
    )


def alone():
    return train(decoder(), layout_of(1, "none", accumulation=1), 0)


def train_all_cases(rank, world):
    expected_gradients, expected = alone()
    results = {}
    for name, (sharding, every, recompute, accumulation) in CASES.items():
        layout = layout_of(world, sharding, every, recompute, accumulation)
        meshes = make_meshes(layout, "cpu")
        model = recompute_blocks(decoder(), layout)
        model = shard(model, layout, meshes, "fp32")
        gradients, parameters = train(model, layout, rank)
        results[name] = deviation(gradients, expected_gradients), deviation(parameters, expected)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(train_all_cases, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_gradients_and_steps_of_one_device(case, two_ranks):
    for results in two_ranks:
        gradients, parameters = results[case]
        assert gradients < 10 * REORDERED
        assert parameters < AFTER_STEPS


WIDE = {
    "HSDP": {"sharding": "hybrid", "shard": 2},
    "HSDP reducing each time": {"sharding": "hybrid", "shard": 2, "every": True},
    "tensor without sharding": {"sharding": "none", "tensor": 2},
    "tensor with FSDP2": {"sharding": "full", "tensor": 2},
    "tensor with ZeRO-1": {"sharding": "zero1", "tensor": 2},
    "tensor with ZeRO-2": {"sharding": "zero2", "tensor": 2},
}


def train_wide_cases(rank, world):
    expected_gradients, expected = alone()
    results = {}
    for name, options in WIDE.items():
        layout = layout_of(world, **options)
        meshes = make_meshes(layout, "cpu")
        model = decoder()
        if layout.tensor > 1:
            split_feed_forward(model, meshes)
        model = shard(model, layout, meshes, "fp32")
        gradients, parameters = train(model, layout, meshes.place.data)
        results[name] = deviation(gradients, expected_gradients), deviation(parameters, expected)
    return results


def split_feed_forward(model, meshes):
    """Tensor parallelism by hand, so that some parameters are DTensors and some are not."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.ffn, meshes.tensor, plan)


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(train_wide_cases, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("case", WIDE)
def test_four_ranks_compute_the_gradients_and_steps_of_one_device(case, four_ranks):
    for results in four_ranks:
        gradients, parameters = results[case]
        assert gradients < 10 * REORDERED
        assert parameters < AFTER_STEPS


def held_between_micro_batches(rank, world, sharding):
    """After each of two micro-batches: does the rank hold whole parameters of a block, a shard of
    its gradient, and the whole gradient?"""
    layout = layout_of(world, sharding)
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32")
    tokens = torch.zeros(layout.micro_batch, SEQ_LEN + 1, dtype=torch.long)
    (group,) = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
    held = []
    for is_last in (False, True):
        set_gradient_sync(model, layout, is_last=is_last)
        loss = loss_of(model, layout, tokens)
        gathered = not isinstance(model.blocks[0].ffn.up.weight, DTensor)
        loss.backward()
        held.append(
            {
                "gathered before backward": gathered,
                "gathered after": not isinstance(model.blocks[0].ffn.up.weight, DTensor),
                "shard": all(each.sharded_param.grad is not None for each in group.fsdp_params),
                "whole": all(each.unsharded_param.grad is not None for each in group.fsdp_params),
            }
        )
    return held


HELD = {
    "full": [(False, False, False, True), (False, False, True, False)],
    "zero1": [(True, True, False, True), (True, False, True, False)],
    "zero2": [(True, True, True, False), (True, False, True, False)],
}


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", HELD)
def test_each_sharding_keeps_between_micro_batches_what_it_says(sharding):
    for held in run_ranks(held_between_micro_batches, 2, sharding):
        assert [tuple(each.values()) for each in held] == HELD[sharding]


def parameters_after_evaluation(rank, world, sharding):
    layout = layout_of(world, sharding)
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32")
    with torch.no_grad():
        model(torch.zeros(1, SEQ_LEN, dtype=torch.long))
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["full", "zero1"])
def test_after_evaluation_a_rank_has_its_shards_and_no_gathered_copies(sharding):
    assert run_ranks(parameters_after_evaluation, 2, sharding) == [True, True]


class Half(nn.Module):
    """A linear that is always used beside one that is used when it is asked for."""

    def __init__(self):
        super().__init__()
        self.main, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs, with_extra):
        outputs = torch.tanh(self.main(inputs))
        return outputs + self.extra(inputs) if with_extra else outputs


class Gated(nn.Module):
    """The first block's extra is used on samples above zero, the others' never; the last two blocks
    are tied."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(4))
        self.blocks[3].main.weight = self.blocks[2].main.weight

    def forward(self, inputs):
        above = bool(inputs.sum() > 0)
        for index, block in enumerate(self.blocks):
            inputs = block(inputs, above and index == 0)
        return inputs


def gated():
    torch.manual_seed(0)
    return Gated().double()


def train_gated(rank, world, sharding, way):
    """Gradients of two steps; sample 0 is above zero, sample 1 below."""
    if way == "FSDP2 before torch 2.13":
        del FSDPModule.set_reduce_scatter_unused_params
    layout = layout_of(world, sharding, accumulation=1)
    meshes = make_meshes(layout, "cpu")
    model = gated()
    if way == "sums":
        parallelize_module(model.blocks[1].main, meshes.tensor, ColwiseParallel())
    several = 100 if layout.sharding == "none" else None  # buckets, so that one lacks gradients
    model = shard(model, layout, meshes, "fp32", bucket_bytes=several)
    samples = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for _ in range(2):
        set_gradient_sync(model, layout, is_last=True)
        for sample in samples.chunk(world)[rank : rank + 1]:
            (model(sample).square().sum() * loss_factor(layout, model)).backward()
        finish_gradients(model)
        gradients = {n: p.grad for n, p in named(model).items()}
        found.append({n: None if g is None else whole(g).clone() for n, g in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP2 before torch 2.13", "sums"])
def test_parameters_that_some_ranks_or_all_leave_unused_get_the_sum_there_is(way):
    samples = [torch.full((1, 4), value, dtype=torch.float64) for value in (1.0, -1.0)]
    model = gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_sharded = way.startswith("FSDP2")
    ranks = run_ranks(train_gated, 2, "full" if is_sharded else "none", way)
    for step in range(2):
        for sample in samples:
            model(sample).square().sum().backward()
        for found in ranks:
            assert found[step].keys() == dict(model.named_parameters()).keys()
            for name, parameter in model.named_parameters():
                gradient = found[step][name]
                if parameter.grad is None:  # FSDP2 reduces zeros once ranks differ
                    assert gradient is None or (is_sharded and not gradient.any())
                else:
                    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()


def train_offloaded(rank, world, sharding):
    layout = layout_of(world, sharding, offload="cpu")
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32")
    assert all(isinstance(each, DTensor) for each in model.parameters()), "FSDP2 has them"
    gradients, parameters = train(model, layout, rank)
    expected_gradients, expected = alone()
    return deviation(gradients, expected_gradients), deviation(parameters, expected)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "sharding"), [(2, "full"), (1, "full"), (1, "zero1")])
def test_s0_4_offloaded_shards_train_to_the_same_numbers_also_on_one_rank(world, sharding):
    for gradients, parameters in run_ranks(train_offloaded, world, sharding):
        assert gradients < 10 * REORDERED
        assert parameters < AFTER_STEPS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sharding": "full", "offload": "nvme"}, "cannot be kept on the disk"),
        ({"sharding": "none", "offload": "cpu"}, "layout.sharding is none"),
    ],
)
def test_offload_that_is_not_there_is_refused(options, said):
    (problem,) = check_offload_of(layout_of(2, **options))
    assert problem.code == "L024"
    assert said in problem.what


def train_compiled(rank, world):
    """Compiled, recomputed and sharded blocks: each inside the next."""
    warnings.simplefilter("default")  # torch.compile's own
    results = {}
    expected_gradients, expected = alone()
    for sharding in ("none", "full"):
        layout = layout_of(world, sharding, recompute="selective")
        model = recompute_blocks(decoder(), layout)
        compile_blocks(model, backend="aot_eager")
        model = shard(model, layout, make_meshes(layout, "cpu"), "fp32")
        gradients, parameters = train(model, layout, rank)
        results[sharding] = (
            deviation(gradients, expected_gradients),
            deviation(parameters, expected),
        )
    return results


@pytest.mark.ranks
def test_compiled_and_recomputed_blocks_train_to_the_same_numbers_in_ddp_and_fsdp2():
    for results in run_ranks(train_compiled, 2):
        for gradients, parameters in results.values():
            assert gradients < 10 * REORDERED
            assert parameters < AFTER_STEPS


def train_in_fp16(rank, world, sharding):
    """Scales and whether a step was applied, with an overflow on the last rank in the third."""
    layout = layout_of(world, sharding, accumulation=1)
    model = decoder().float()
    model = shard(model, layout, make_meshes(layout, "cpu"), "fp16")
    scaler = LossScaler(initial=2.0**10, patience=2)
    found = []
    for step in range(4):
        tokens = torch.full((layout.micro_batch, SEQ_LEN + 1), step)
        set_gradient_sync(model, layout, is_last=True)
        with autocast("fp16", "cpu", layout):
            loss = loss_of(model, layout, tokens)
        if step == 2 and rank == world - 1:
            loss = loss * float("inf")
        (loss * scaler.factor).backward()
        finish_gradients(model)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        bad = torch.tensor(float(not torch.isfinite(whole(norm))))
        torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        scaler.update(found_inf=bool(bad))
        found.append((bool(bad), scaler.factor, float(whole(norm)) / scaler.factor))
        model.zero_grad()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["none", "full", "zero1"])
def test_fp16_refuses_a_step_on_all_ranks_when_one_overflows(sharding):
    first, second = run_ranks(train_in_fp16, 2, sharding)
    assert [each[:2] for each in first] == [each[:2] for each in second]
    assert [each[:2] for each in first] == [
        (False, 2.0**10),
        (False, 2.0**11),
        (True, 2.0**10),
        (False, 2.0**10),
    ]


def train_with_a_static_graph(rank, world):
    layout = layout_of(world, "none", accumulation=1)
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32", static_graph=True)
    gradients, parameters = train(model, layout, rank)
    expected_gradients, expected = alone()
    return deviation(gradients, expected_gradients), deviation(parameters, expected)


@pytest.mark.ranks
def test_ddp_with_a_static_graph_trains_to_the_same_numbers():
    for gradients, parameters in run_ranks(train_with_a_static_graph, 2):
        assert gradients < 10 * REORDERED
        assert parameters < AFTER_STEPS


def test_a_static_graph_with_accumulation_is_refused():
    (problem,) = check_all_reduce(layout_of(2, "none", accumulation=2), static_graph=True)
    assert problem.where == "train.static_graph"


@pytest.mark.parametrize(
    ("sharding", "is_plain", "asked", "where"),
    [
        ("full", True, {"bucket_bytes": 2**20}, ["train.bucket"]),
        ("full", True, {"static_graph": True}, ["train.static_graph"]),
        ("none", False, {"static_graph": True}, ["train.static_graph"]),
        ("none", False, {"bucket_bytes": 2**20}, []),
        ("none", True, {"bucket_bytes": 2**20, "static_graph": True}, []),
    ],
)
def test_what_only_ddp_can_do_is_refused_elsewhere(sharding, is_plain, asked, where):
    layout = layout_of(2, sharding, accumulation=1)
    problems = list(check_all_reduce(layout, is_plain=is_plain, **asked))
    assert [problem.where for problem in problems] == where
    assert list(check_all_reduce(layout_of(1, "none"), is_plain=is_plain, **asked)) == []


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("rank", [0, 4])
def test_pretended_ranks_of_a_pipeline_shard_and_split_tensors_without_a_warning(
    rank: int, micro_batch: int
):
    """FSDP2 warns of a block that gives a view; in pretended values no number can be read."""
    layout = Layout(
        data=2,
        sharding="full",
        tensor=2,
        pipeline=2,
        micro_batch=micro_batch,
        accumulation=2,
    )
    with fake_rank(layout, rank):
        meshes = make_meshes(layout, "cpu")
        with torch.device("meta"):
            whole = Decoder(SHAPE, SEQ_LEN)
        model = apply(whole, layout, meshes, precision="bf16")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            empty = torch.zeros(micro_batch, SEQ_LEN, dtype=torch.long)
            forward_backward(model, meshes, [(empty, empty)] * 2, precision="bf16")
        missing = [name for name, each in model.named_parameters() if each.grad is None]
        assert missing == []


def test_pretended_ranks_of_ddp_are_taken_to_use_what_this_rank_uses():
    layout = Layout(data=4, sharding="none", micro_batch=1, accumulation=1)
    with fake_rank(layout, 0):
        meshes = make_meshes(layout, "cpu")
        replica = Replica(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), meshes.holders)
        one = replica.module[0](torch.ones(1, 2))
        both = one + replica.module[1](torch.ones(1, 2))
        with FakeTensorMode():  # no number can be read
            assert replica._some_rank_has_unused(one)
            assert not replica._some_rank_has_unused(both)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((8, 96, 64), 2), ((32003, 64), 0), ((64, 3), 0), ((8, 64), 1), ((7, 5), 0), ((1024,), 0)],
)
def test_parameters_are_sharded_along_a_dim_that_every_rank_gets_its_share_of(
    shape: tuple[int, ...], dim: int
):
    layout = Layout(data=64, sharding="full", micro_batch=1, accumulation=1)
    with fake_rank(layout, 0):
        placement = even_placement(make_meshes(layout, "cpu").fsdp)
        assert placement(nn.Parameter(torch.empty(shape, device="meta"))).dim == dim

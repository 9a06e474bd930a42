"""Proofs by themselves: extension over blocks, large worlds, time, and what cannot be proved."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.prove.cases import ON_TWO, SHAPE, layout, pipeline, request, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import JobError, PlanError
from paceline.estimate.rates import LinkRates, MatmulRate, Rates
from paceline.profile.saved import Modules
from paceline.prove.proof import ModelRequest
from paceline.prove.prove import prove
from paceline.prove.world import world
from paceline.runtime.optimizer.adamw_8bit import dequantise, quantise

pytestmark = pytest.mark.filterwarnings("ignore")

DEEP = ModelRequest(decoder=replace(SHAPE, layers=20))
EXTENDED = {
    "FSDP2": layout(data=64),
    "FSDP2 accumulating": layout(data=64, accumulation=3),
    "FSDP2, recompute": layout(data=64, recompute="full"),
    "FSDP2, recompute every 2": layout(data=64, recompute="full", recompute_every=2),
    "FSDP2 x tensor": layout(data=8, tensor=2),
    "HSDP": layout(data=16, sharding="hybrid", shard=4),
}
EXTENDED_QUICKLY = ("FSDP2 x tensor",)
"""The others, much like them, are marked slow."""


def link(size: int, rate: float, latency_s: float) -> LinkRates:
    return LinkRates(
        size=size,
        gather_bytes_per_s=rate,
        all_reduce_bytes_per_s=rate,
        all_to_all_bytes_per_s=rate,
        latency_s=latency_s,
        pair_bytes_per_s=rate,
    )


MATMUL = MatmulRate(
    flops_per_s=5e14,
    short_k=100.0,
    wave=0.5,
    launch_s=1e-6,
    bytes_per_s=2e12,
    num_multiprocessors=132,
    operand_bytes=2.0,
)
RATES = Rates(
    matmul=MATMUL,
    wide_matmul=MATMUL,
    weight_matmul=MATMUL,
    attention_flops_per_s=3e14,
    attention_half_len=1000.0,
    attention_backward=0.7,
    is_flash=1.0,
    memory_bytes_per_s=2e12,
    hidden_passes=10.0,
    ffn_passes=2.0,
    host_s=5e-6,
    routed_ops=10.0,
    grouped_share=0.8,
    levels=(link(8, 3e11, 5e-6), link(64, 4e10, 1e-5)),
    domain=8,
    collective_s=0.0,
    gradient_overlap=0.9,
    gather_overlap=0.9,
    tensor_overlap=0.0,
    pipeline_overlap=0.0,
    selective_cheap=1.0,
    second_products=0.0,
    modules=Modules(),
    selective_attention=0.0,
    contention=0.0,
    straggler=0.0,
    step_s=0.0,
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in EXTENDED_QUICKLY else [pytest.mark.slow])
        for name in EXTENDED
    ],
)
def test_a_few_blocks_extended_to_all_equal_the_trace_of_all(name):
    asked = request(EXTENDED[name], model=DEEP)
    (few,), (all_of_them,) = prove(asked).stages, prove(replace(asked, whole=True)).stages
    assert "blocks traced" in few.how
    assert all_of_them.how == "every block traced"
    assert few.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=1e-3)
    assert few.moment == all_of_them.moment
    assert few.resting_bytes == all_of_them.resting_bytes
    assert sum(few.flops.values()) == pytest.approx(sum(all_of_them.flops.values()))
    assert totals(few) == totals(all_of_them)


def totals(stage):
    found = Counter()
    for each in stage.collectives:
        found[each.kind, each.group_size, "count"] += each.count
        found[each.kind, each.group_size, "bytes"] += each.num_bytes
    return found


def test_a_world_of_1024_ranks_is_proved_and_its_links_are_told_apart():
    asked = request(layout(data=128, tensor=8), model=model_for_tensor_8())
    (stage,) = prove(asked).stages
    links = {(each.group_size, each.link) for each in stage.collectives if each.group_size < 1024}
    assert links == {(8, "inside node"), (128, "between nodes")}
    assert sum(stage.parts.values()) == stage.peak_bytes


def model_for_tensor_8():
    return ModelRequest(decoder=replace(SHAPE, heads=8, kv_heads=8, head_dim=8))


def test_parts_of_a_shard_are_the_shard():
    (stage,) = prove(request(layout(data=4), "fp32")).stages
    num_parameters = 2 * 256 * 64 + 64 + 8 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert stage.parts["parameters"] == num_parameters * 4 // 4
    assert stage.parts["optimizer"] == pytest.approx(2 * num_parameters * 4 // 4, rel=1e-3)


def test_every_block_is_gathered_forward_and_backward_and_reduced_once():
    (stage,) = prove(request(layout(data=4, recompute="full"))).stages
    counts = {(c.kind, c.phase): c.count for c in stage.collectives if c.where == "blocks"}
    assert counts["all-gather", "forward"] == 8
    assert counts["reduce-scatter", "backward"] == 8


@pytest.mark.parametrize("of", [pytest.param(layout(), marks=pytest.mark.repeat), tensor()])
def test_muon_keeps_the_same_for_every_block_though_there_be_but_one(of):
    """As in a run, where the model's ways say which matrices are a block's."""

    def state_bytes(blocks: int) -> int:
        model = ModelRequest(decoder=replace(SHAPE, layers=blocks))
        (stage,) = prove(request(of, model=model, optimizer="muon", whole=True)).stages
        return stage.parts["optimizer"]

    assert state_bytes(3) - state_bytes(2) == state_bytes(2) - state_bytes(1)


def test_adamw_in_a_byte_is_proved_and_its_tables_hold_numbers_afterwards():
    def state_bytes(optimizer: str) -> int:
        (stage,) = prove(request(layout(), "fp32", optimizer=optimizer)).stages
        return stage.parts["optimizer"]

    assert state_bytes("adamw-8bit") < 0.4 * state_bytes("adamw")
    values = torch.linspace(-1, 1, 256)
    codes, largest = quantise(values, signed=True)
    assert torch.allclose(dequantise(codes, largest, signed=True), values, atol=0.02)


def test_one_rank_is_proved_without_any_collective():
    (stage,) = prove(request(layout(data=1, sharding="none"))).stages
    assert stage.collectives == ()
    assert stage.peak_bytes > stage.resting_bytes


def test_time_is_simulated_with_communication_hidden_and_exposed():
    proof = prove(request(layout(data=16, tensor=2), rates=RATES, wants_trace=True))
    time = proof.simulated
    assert 0 < time.compute_s <= time.step_s
    assert 0 < time.exposed_s <= time.communication_s
    assert time.bubble_s == 0
    assert {event["tid"] for event in proof.trace} >= {"kernels", "all-gather 16 ranks"}
    json.dumps(proof.trace)


def test_a_pipelines_first_stage_waits_in_its_bubble():
    four = layout(data=1, pipeline=4, sharding="none", accumulation=8)
    proof = prove(request(four, rates=replace(RATES, host_s=0.0)))
    assert [stage.rank for stage in proof.stages] == [0, 1, 2, 3]
    assert proof.simulated.bubble_s > 0.2 * proof.simulated.step_s
    seen = {(each.kind, each.phase) for stage in proof.stages for each in stage.collectives}
    messages = {each for each in seen if each[0] in ("send", "receive")}
    passes = [(kind, phase) for kind in ("send", "receive") for phase in ("forward", "backward")]
    assert messages == set(passes)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(layout(data=1, context=2), marks=pytest.mark.repeat),
        layout(data=1, context=4, sharding="none", pipeline=2, accumulation=4),
        layout(data=2, context=2, context_kind="ulysses"),
    ],
    ids=["ring", "ring x 1F1B", "Ulysses"],
)
def test_context_ranks_have_a_simulated_step(of):
    proof = prove(request(of, rates=RATES))
    assert proof.untimed == ""
    assert 0 < proof.simulated.exposed_s < proof.simulated.step_s


def test_without_rates_the_reason_is_given():
    proof = prove(request(layout()))
    assert proof.simulated is None
    assert proof.untimed == "the cluster's rates are not known"


def sent_bytes(**fields):
    """Of all all-reduces in the backward pass of a step of DDP."""
    (stage,) = prove(request(layout(sharding="none"), "fp32", **fields)).stages
    each = [c for c in stage.collectives if (c.kind, c.phase) == ("all-reduce", "backward")]
    return sum(c.num_bytes for c in each), sum(c.count for c in each)


def test_s1_12_compressed_gradients_are_counted_as_they_are_sent():
    plain, _ = sent_bytes()
    assert sent_bytes(compression="bf16")[0] == plain // 2
    assert sent_bytes(compression="fp16")[0] == plain // 2
    # An output matrix and an embedding of 256 x 64, and 8 blocks of matrices of 64 x 64, 32 x 64
    # (twice each) and 64 x 128 (three), each as two factors of one column; norms as they are.
    thin = 2 * (256 + 64) + 8 * (2 * 128 + 2 * 96 + 3 * 192) + 17 * 64
    assert sent_bytes(compression="powersgd", powersgd_rank=1)[0] == 4 * thin


def test_an_unhidden_gather_makes_the_step_longer():
    slow = replace(RATES, levels=(RATES.levels[0], link(64, 1e9, 1e-5)))
    asked = request(layout(data=16), rates=replace(RATES, host_s=0.0))
    fast_s = prove(asked).simulated.step_s
    assert prove(replace(asked, rates=slow)).simulated.step_s > 1.5 * fast_s


FACTORIES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(16, 16)

    def forward(self, hidden):
        return self.matrix(hidden)

class Picky(Block):
    def forward(self, hidden):
        return self.matrix(hidden[hidden.sum(-1) > 0]).sum() + hidden

class Net(nn.Module):
    def __init__(self, kind=Block):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(kind() for _ in range(14))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

def good():
    return Net()

def picky():
    return Net(Picky)

def raises():
    raise RuntimeError("no weights today")

def nothing():
    return 3
"""


def own(tmp_path, name):
    (tmp_path / "own_models.py").write_text(FACTORIES)
    return ModelRequest(factory=f"own_models:{name}", folder=str(tmp_path))


def test_a_model_of_ones_own_is_proved_over_data_ranks(tmp_path):
    (stage,) = prove(request(layout(data=8), model=own(tmp_path, "good"))).stages
    assert stage.num_blocks == 14
    assert " blocks traced (" in stage.how


def test_shapes_that_depend_on_values_are_named_with_their_place(tmp_path):
    with pytest.raises(JobError, match=r"F001: its shapes depend on values.*Picky.forward"):
        prove(request(layout(), model=own(tmp_path, "picky")))


@pytest.mark.parametrize(
    ("name", "told"), [("raises", "no weights today"), ("nothing", "returned a int")]
)
def test_a_factory_that_builds_no_model_is_said(tmp_path, name, told):
    with pytest.raises(JobError, match=rf"J009: .*{told}"):
        prove(request(layout(), model=own(tmp_path, name)))


def test_a_model_without_ways_is_not_split_over_tensor_ranks(tmp_path):
    with pytest.raises(PlanError, match="L020"):
        prove(request(layout(tensor=2), model=own(tmp_path, "good")))


@pytest.mark.parametrize("name", ["FSDP2", pytest.param("ZeRO-2", marks=pytest.mark.repeat)])
def test_an_offloaded_layout_is_proved_without_what_the_host_holds(name):
    here = replace(ON_TWO[name], offload="cpu", offload_parameters=True)
    proof = prove(request(here, rates=RATES))
    (stage,) = proof.stages
    assert not {"parameters", "optimizer"} & set(stage.parts)
    assert stage.peak_bytes < prove(request(ON_TWO[name])).stages[0].peak_bytes
    assert (proof.simulated, proof.untimed) == (
        None,
        "the rates of the link to the host are unknown",
    )
    assert any("bytes of the host are not counted" in note for note in proof.notes)


@pytest.mark.parametrize("of", [ON_TWO["FSDP2"], pipeline(schedule="1f1b")], ids=["FSDP2", "1F1B"])
def test_state_alone_on_the_host_or_its_disk_leaves_the_rest_of_the_step_as_it_was(of):
    """It was refused (F003)."""
    (before, *_) = prove(request(of)).stages
    for place in ("cpu", "nvme"):
        (stage, *_) = prove(request(replace(of, offload=place))).stages
        resting = before.resting_bytes - before.parts["optimizer"]
        assert "optimizer" not in stage.parts
        assert stage.resting_bytes == resting
        assert [(c.kind, c.count) for c in stage.collectives] == [
            (c.kind, c.count) for c in before.collectives
        ]


def test_a_world_is_not_given_the_groups_of_an_earlier_one():
    for num_before in (0, 3):
        with world(0, 4):
            for _ in range(num_before):  # the mesh's groups have other names then
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
            made = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).relu()
            assert made.device_mesh.get_group() is mesh.get_group()

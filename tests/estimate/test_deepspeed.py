"""What ZeRO's optimizer holds beside a shard, as its source has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.catalog.engines import Way, find_engine
from paceline.estimate import Case, case_of, price_one
from paceline.job import parse_job
from paceline.parallel import Layout
from paceline.parallel.abilities import planned_engine
from paceline.parallel.table import table_of
from paceline.plan.host import host_bytes_of_one, memory_beside_disk_of_one, over_host_bytes
from paceline.profile import resolve_profile
from paceline.topology import find_cluster

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 4, per_node: 8}
train: {global_batch: 64, steps: 100}
"""
ZERO1 = Layout(data=8, sharding="zero1", micro_batch=1, accumulation=8, recompute="full")


def case(engine: str, *overrides: str, is_planned: bool = False) -> Case:
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    found = find_engine(*engine.split())
    return case_of(
        resolve_profile(job),
        find_cluster(job.spec.cluster, job),
        precision="bf16",
        engine=planned_engine(found) if is_planned else found,
    )


DEFAULT, PLANNED = case("deepspeed"), case("deepspeed", is_planned=True)
N = DEFAULT.profile.num_parameters


def test_zero1_as_written_holds_bf16_gradients_until_they_are_added_to_those_in_float32():
    """runtime/bf16_optimizer.py, `update_hp_grads`: after the backward pass. 16 GB of an 8B model
    were not counted."""
    parts = price_one(ZERO1, PLANNED).memory.parts
    assert parts["gradients"] == pytest.approx((4 + 2) * N)


def test_zero2_as_written_adds_each_gradient_to_its_shard_as_it_comes():
    parts = price_one(replace(ZERO1, sharding="zero2"), PLANNED).memory.parts
    assert parts["gradients"] == pytest.approx(4 * N / 8)


def test_zero1_with_deepspeeds_own_settings_adds_gradients_in_bf16():
    assert price_one(ZERO1, DEFAULT).memory.parts["gradients"] == pytest.approx(2 * N)


@pytest.mark.parametrize(
    ("changes", "on_host", "on_device"),
    [
        ({"sharding": "full"}, 12 + 4 + 4, 0),
        ({"sharding": "full", "offload_parameters": True}, 2 + 12 + 4 + 4, 0),
        ({"sharding": "zero2"}, 12 + 4 + 2, 4),
    ],
)
def test_an_offloaded_optimizer_has_its_gradients_beside_it_in_the_host_s_memory(
    changes: dict[str, Any], on_host: int, on_device: int
):
    """stage3.py: `grad_partitions_flat_buffer` and a float32 `.grad`; stage_1_and_2.py: `.grad` and
    16-bit parameters on their way back. 12 bytes a parameter were counted: a node that was said to
    hold 70B parameters was 380 GiB short."""
    layout = replace(ZERO1, offload="cpu", reduce_every_micro_batch=True, **changes)
    assert host_bytes_of_one(layout, PLANNED) == pytest.approx(on_host * N)
    parts = price_one(layout, PLANNED).memory.parts
    assert parts["gradients"] == pytest.approx(on_device * N / 8)


@pytest.mark.parametrize(("accumulation", "on_host"), [(8, 12 + 4 + 2 + 2), (1, 12 + 4 + 2)])
def test_releases_before_0_19_8_add_offloaded_gradients_up_in_the_host_s_memory(
    accumulation: int, on_host: int
):
    """stage_1_and_2.py, `accumulated_grads_in_cpu`: pinned, in 16 bits, one for each parameter of
    the shard. 18 bytes a parameter were counted, and 4 on the accelerator."""
    older = case("deepspeed 0.19.7", is_planned=True)
    layout = replace(
        ZERO1,
        offload="cpu",
        reduce_every_micro_batch=True,
        sharding="zero2",
        accumulation=accumulation,
    )
    assert host_bytes_of_one(layout, older) == pytest.approx(on_host * N)
    assert price_one(layout, older).memory.parts["gradients"] == 0
    whole = replace(layout, sharding="zero1", reduce_every_micro_batch=False)
    assert host_bytes_of_one(whole, older) == pytest.approx(on_host * N)


def test_zero3_keeps_its_gradients_and_swap_buffers_in_memory_beside_an_optimizer_on_disk():
    """stage3.py of 0.19.8: `self.device` is the host's memory for `nvme` too, so
    `grad_partitions_flat_buffer` is there; on the disk go 12 bytes and a float32 gradient. Four
    buffers of the swapper and one for the gradient have a sub-group's elements each."""
    layout = replace(ZERO1, offload="nvme", sharding="full", reduce_every_micro_batch=True)
    assert host_bytes_of_one(layout, PLANNED) == pytest.approx((12 + 4) * N)
    buffers = 8 * 5 * 4 * min(N / 8, 10**9)
    assert memory_beside_disk_of_one(layout, PLANNED) == pytest.approx(4 * N + buffers)
    in_memory = replace(layout, offload="cpu")
    assert memory_beside_disk_of_one(in_memory, PLANNED) == 0
    table = table_of([layout])
    for has, fits in ((5 * N + buffers, True), (3 * N + buffers, False)):
        small = replace(PLANNED, cluster=replace(PLANNED.cluster, host_bytes=int(has)))
        assert np.isinf(over_host_bytes(table, small)).all() == fits


@pytest.mark.parametrize(("seq_len", "is_step_fullest"), [(64, True), (4096, False)])
def test_a_flat_gradient_of_the_step_gets_no_memory_that_activations_have_left(
    seq_len: int, is_step_fullest: bool
):
    """Activations and the step's 6 bytes a parameter of the shard lie side by side in what is
    reserved, whichever of them is the fullest moment."""
    priced = case("deepspeed", f"data.seq_len={seq_len}")
    memory = price_one(ZERO1, priced).memory
    smaller = replace(priced, engine=replace(priced.engine, step_bytes=0.0))
    without = price_one(ZERO1, smaller).memory
    step = 6 * N / 8
    assert memory.reserved_bytes - without.reserved_bytes == pytest.approx(step, rel=0.1)
    assert (memory.parts["gathered"] == pytest.approx(step)) == is_step_fullest


def test_zero3_updates_a_billion_parameters_at_a_time():
    """`sub_group_size`: the shard of 70B on 8 ranks has 8.8 billion, 53 GB of temporaries."""
    large = case("deepspeed", "model.preset=llama-3-70b", "data.seq_len=64")
    layout = replace(ZERO1, sharding="full")
    whole = replace(large, engine=replace(large.engine, step_unit=0))
    most, at_once = (price_one(layout, each).memory.reserved_bytes for each in (whole, large))
    assert most - at_once == pytest.approx(6 * (large.profile.num_parameters / 8 - 1e9), rel=0.1)


def data_s(sharding: str, ways: tuple[Way, ...] = PLANNED.engine.ways, **changes: float) -> float:
    """Seconds between data ranks in a step of 8 micro-batches."""
    each = sharding == "zero2"
    layout = replace(ZERO1, data=32, sharding=sharding, reduce_every_micro_batch=each)
    engine, rates = replace(PLANNED.engine, ways=ways), replace(PLANNED.rates, **changes)
    return price_one(layout, replace(PLANNED, engine=engine, rates=rates)).terms["data"]


HIDES_NOTHING = {"gradient_overlap": 0.0, "gather_overlap": 0.0, "collective_s": 0.0}


@pytest.mark.parametrize(
    ("sharding", "sent"), [("none", 2), ("zero1", 2 + 1), ("zero2", 8 * 2 + 1)]
)
def test_zero1_and_2_reduce_gradients_with_an_all_reduce(sharding: str, sent: int):
    """stage_1_and_2.py, `average_tensor`: each rank keeps its part of a reduction whose whole all
    get, twice the bytes of a reduce-scatter; parameters are gathered once."""
    of_scatter = data_s("zero1", (), **HIDES_NOTHING) / 2
    assert data_s(sharding, **HIDES_NOTHING) == pytest.approx(sent * of_scatter, rel=0.02)


@pytest.mark.parametrize(
    ("sharding", "hides"), [("none", False), ("zero1", False), ("zero2", True)]
)
def test_only_zero2_hides_a_reduction_of_bf16_gradients_behind_the_backward_pass(
    sharding: str, hides: bool
):
    """engine.py of 0.19.8: stage 0, and the BF16_Optimizer that stage 1 with float32 gradients is,
    reduce in `allreduce_gradients`, after backward(). 116 of 138 ms of ZeRO-1 were taken for
    hidden."""
    exposed = data_s(sharding, gradient_overlap=0.0, gather_overlap=0.0)
    assert (data_s(sharding) < exposed) == hides

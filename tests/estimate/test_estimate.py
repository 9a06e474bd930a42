"""Bytes and seconds of layouts, part by part, and against what was measured."""

from dataclasses import replace

import pytest
from tests.plan.scene import JOB, TINY, cluster_of, job_of

from paceline.estimate import Estimate, MemoryEstimate, estimate, estimate_memory
from paceline.estimate.time import group_bytes_per_s
from paceline.parallel import Layout
from paceline.profile import ModuleFacts, profile_decoder, profile_module, resolve_decoder

P = 8_030_261_248
H100S = cluster_of(job_of())
LLAMA = profile_decoder(resolve_decoder(job_of()), 4096, kernels="gpu")  # type: ignore[arg-type]


def layout_of(**changes: object) -> Layout:
    fields = {"data": 8, "sharding": "full", "micro_batch": 1, "accumulation": 1}
    return Layout(**(fields | changes))  # type: ignore[arg-type]


def memory_of(layout: Layout, optimizer: str = "adamw", precision: str = "bf16") -> MemoryEstimate:
    return estimate_memory(layout, LLAMA, H100S, precision=precision, optimizer=optimizer)  # type: ignore[arg-type]


def price(layout: Layout, *overrides: str) -> Estimate:
    job = job_of(JOB, "train.precision=bf16", *overrides)
    (found,) = estimate([layout], LLAMA, cluster_of(job), job.spec.train, 4096)
    return found


def test_ddp_holds_all_states_in_float32():
    memory = memory_of(layout_of(sharding="none"))
    assert memory.parameters_bytes == memory.gradients_bytes == 4 * P
    assert memory.optimizer_bytes == 8 * P
    assert memory.master_copy_bytes == 0


def test_full_sharding_divides_the_states_and_rounds_up():
    memory = memory_of(layout_of())
    assert 4 * P / 8 <= memory.parameters_bytes < 4 * P / 8 + 4 * 33
    assert memory.optimizer_bytes == 2 * memory.parameters_bytes


def test_sgd_keeps_half_the_state():
    assert memory_of(layout_of(), "sgd").optimizer_bytes == memory_of(layout_of()).parameters_bytes


def test_gradients_stay_whole_between_micro_batches_unless_reduced_each_time():
    assert memory_of(layout_of(accumulation=2)).gradients_bytes == 4 * P
    reduced = memory_of(layout_of(accumulation=2, reduce_every_micro_batch=True))
    assert reduced.gradients_bytes == reduced.parameters_bytes


def test_autocast_keeps_a_bf16_copy_of_all_matrices():
    assert memory_of(layout_of(sharding="none")).gathered_bytes == 2 * P
    assert memory_of(layout_of(sharding="none"), precision="fp32").gathered_bytes == 0


def test_sharding_over_one_rank_is_the_same_as_none():
    one = {"data": 1, "micro_batch": 2}
    assert memory_of(layout_of(**one)) == memory_of(layout_of(sharding="none", **one))


def test_activations_grow_with_the_micro_batch():
    one, two = (memory_of(layout_of(micro_batch=n)).activations_bytes for n in (1, 2))
    assert one is not None
    assert two == 2 * one


def test_the_parts_add_up():
    memory = memory_of(layout_of())
    assert memory.total_bytes == sum(part or 0 for part in memory.parts.values())


def test_unknown_activations_leave_the_total_unknown():
    facts = ModuleFacts(num_parameters=10**6, largest_block_parameters=10**5, num_blocks=8)
    memory = estimate_memory(
        layout_of(), profile_module(facts), H100S, precision="fp32", optimizer="adamw"
    )
    assert memory.activations_bytes is None
    assert memory.total_bytes is None
    assert memory.known_bytes > 12 * 10**6 // 8


def test_an_unknown_module_has_an_unknown_time():
    profile = profile_module(
        ModuleFacts(num_parameters=9, largest_block_parameters=0, num_blocks=0)
    )
    job = job_of(JOB, "train.precision=bf16")
    (found,) = estimate([layout_of()], profile, H100S, job.spec.train, None)
    assert found.step_s is None
    assert found.tokens_per_s is None
    assert found.terms == {}


def test_an_accelerator_without_rates_has_an_unknown_time():
    cluster = replace(H100S, peak_flops_per_s={}, link_bytes_per_s=None)
    job = job_of(JOB, "train.precision=bf16")
    (found,) = estimate([layout_of()], LLAMA, cluster, job.spec.train, 4096)
    assert found.step_s is None
    assert found.memory.total_bytes is not None


def test_the_step_is_the_sum_of_its_terms():
    found = price(layout_of())
    assert set(found.terms) == {"compute", "communication", "optimizer"}
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.tokens_per_s == pytest.approx(8 * 4096 / (found.step_s or 0))


def test_compute_is_three_forward_passes_at_the_stated_efficiency():
    forward = LLAMA.forward_flops_per_sample or 0
    share = H100S.compute_efficiency["bf16"]
    assert price(layout_of()).terms["compute"] == pytest.approx(3 * forward / (989.4e12 * share))


def test_a_checkpoint_has_parameters_and_moments():
    assert price(layout_of()).num_checkpoint_bytes == 12 * P
    assert price(layout_of(), "train.optimizer=sgd").num_checkpoint_bytes == 8 * P


def test_a_batch_comes_back_in_its_order():
    layouts = [layout_of(micro_batch=n) for n in (4, 1, 2)]
    job = job_of(JOB, "train.precision=bf16")
    found = estimate(layouts, LLAMA, H100S, job.spec.train, 4096)
    assert [f.memory for f in found] == [price(layout).memory for layout in layouts]


def test_a_slow_network_between_nodes_is_what_a_ring_gets():
    slow = cluster_of(job_of(JOB, "cluster.nodes=2", "cluster.network=10Gb/s"))
    assert group_bytes_per_s(slow) == 1.25e9 * slow.network_efficiency
    assert group_bytes_per_s(H100S) == 450e9 * H100S.link_efficiency


# Peak resident set of the fullest of 2 ranks, 6 steps of a 19.2M decoder, 2026-11-21: Python
# 3.11.7, torch 2.13.0+cpu, AMD EPYC (Zen 4), 2 cores; `paceline run` with the job below.
SEEN_MIB = {"none": 1167, "full": 1157}


@pytest.mark.parametrize("sharding", SEEN_MIB)
def test_memory_on_a_cpu_is_within_15_percent_of_what_was_seen(sharding: str):
    job = job_of(
        TINY,
        "model={decoder: {layers: 6, hidden: 512, heads: 8}}",
        "data.seq_len=256",
        "train.global_batch=8",
    )
    shape = resolve_decoder(job)
    assert shape is not None
    memory = estimate_memory(
        layout_of(data=2, sharding=sharding, micro_batch=4),
        profile_decoder(shape, 256),
        cluster_of(job),
        precision="fp32",
        optimizer="adamw",
    )
    assert (memory.total_bytes or 0) / 2**20 == pytest.approx(SEEN_MIB[sharding], rel=0.15)

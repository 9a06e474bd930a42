import re
from dataclasses import replace

import pytest
from tests.plan.scene import JOB, TINY, plan_of

from paceline.render.fabric import (
    decide_network,
    log_lines,
    messages,
    site_settings,
)

TWO_NODES = ("cluster.nodes=2",)
FULL = (*TWO_NODES, "layout={sharding: full, data: 16, micro_batch: 1}")
TCP = (*FULL, "cluster.network=10Gb/s")
LOG = """
node1:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.10.10.10<0>
node1:25668:27396 [0] NCCL INFO Using network IB
node1:25668:27396 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
"""Lines as NCCL prints them: github.com/NVIDIA/nccl/issues/1537 and 1597."""


def test_one_node_needs_no_network():
    found = decide_network(plan_of(JOB))
    assert (found.choice, found.others, found.messages) == ("none", (), ())


def test_a_slower_network_makes_a_longer_step_and_only_its_own_terms_grow():
    found = decide_network(plan_of(JOB, *FULL))
    assert found.choice == "rdma"
    times = [each.times_as_long for each in found.others]
    assert [each.link for each in found.others] == ["ethernet-100", "ethernet-25", "ethernet-10"]
    assert times == sorted(times)
    assert times[-1] > 2
    for each in found.others:
        assert set(each.slower_s) <= {"data", "compute", "stragglers", "pipeline"}
        assert each.step_s == pytest.approx(
            each.step_s / each.times_as_long + sum(each.slower_s.values()), rel=1e-6
        )
    assert found.reason.startswith("RDMA pays")


def test_s4_4_the_slowdown_is_that_of_a_plan_for_the_slower_network():
    fixed = (*FULL, "layout.recompute=full", "layout.recompute_every=1")
    fast, slow = plan_of(JOB, *fixed), plan_of(JOB, *fixed, "cluster.network=100Gb/s")
    assert fast.layout == slow.layout
    other = decide_network(fast).others[0]
    assert other.link == "ethernet-100"
    # A plan knows the rate it is given and keeps the latency of its own kind of link.
    assert other.step_s == pytest.approx(slow.estimate.step_s, rel=0.02)


def test_a_job_that_computes_long_does_not_notice_tcp():
    patient = (*TWO_NODES, "layout={sharding: none, data: 16}", "train.global_batch=262144")
    plan = plan_of(JOB, "model={preset: gpt2}", "data.seq_len=1024", *patient)
    found = decide_network(plan)
    assert all(each.times_as_long < 1.05 for each in found.others), found.reason
    assert "less than is noticed" in found.reason


def test_over_tcp_it_is_said_what_rdma_would_gain():
    found = decide_network(plan_of(JOB, *TCP))
    assert found.choice == "tcp"
    assert found.reason.startswith("RDMA would pay")
    assert all(each.times_as_long < 1 for each in found.others)


def test_gloo_is_tcp_and_no_time_is_made_up_for_it():
    found = decide_network(plan_of(TINY, "cluster={accelerator: cpu, nodes: 2, per_node: 1}"))
    assert found.others == ()


def test_messages_add_up_to_the_parameters():
    plan = plan_of(JOB, *FULL)
    sizes = {each.what: each for each in messages(plan)}
    scattered = sizes["gradients of a block, scattered"]
    assert scattered.num_bytes * scattered.times == pytest.approx(
        4 * plan.profile.num_trained_parameters * 1, rel=1e-6
    )
    gathered = sizes["parameters of a block, gathered"]
    passes = 2 * plan.layout.accumulation
    assert gathered.num_bytes * gathered.times == pytest.approx(
        2 * passes * plan.profile.num_trained_parameters, rel=1e-6
    )


def test_s4_5_the_log_is_searched_for_words_that_nccl_prints():
    lines = {line.pattern: line for line in log_lines(plan_of(JOB, *FULL))}
    for line in lines.values():
        assert bool(re.search(line.pattern, LOG)) == (line.wanted in ("yes", "better"))
    said = " ".join(line.pattern for line in lines.values())
    assert "InfiniBand" not in said  # "Using network InfiniBand" is never printed
    assert "NET/IB/GDR enabled" not in said


def test_a_plugin_of_infiniband_counts_and_sockets_do_not():
    wanted = [line for line in log_lines(plan_of(JOB, *FULL)) if line.wanted == "yes"]
    assert all(
        re.search(line.pattern, "Using network IBext_v8 via NET/IBext_v8/0") for line in wanted
    )
    assert not any(re.search(line.pattern, "Using network Socket") for line in wanted)


def test_efa_is_libfabric_in_the_log():
    plan = plan_of(JOB, *FULL)
    levels = (*plan.cluster.levels[:-1], replace(plan.cluster.levels[-1], link="efa-v2-100"))
    plan = replace(plan, cluster=replace(plan.cluster, levels=levels))
    assert re.search(log_lines(plan)[0].pattern, "NCCL INFO Using network AWS Libfabric")
    assert re.search(log_lines(plan)[3].pattern, "via NET/AWS Libfabric/1/GDRDMA")
    assert [each.name for each in site_settings(plan)] == ["NCCL_SOCKET_IFNAME"]


def test_a_port_is_named_exactly():
    (hca,) = [each for each in site_settings(plan_of(JOB, *FULL)) if each.name == "NCCL_IB_HCA"]
    assert hca.value.startswith("=")

from tests.plan.scene import JOB, TINY, plan_of

from paceline.contracts.operate import launch_command
from paceline.render.environment import environment, export_lines, removals

TWO_NODES = ("cluster.nodes=2", "cluster.accelerator=H100-SXM")


def names(plan):
    return {each.name for each in environment(plan)}


def test_what_a_document_once_advised_is_taken_away_and_never_set():
    plan = plan_of(JOB, *TWO_NODES)
    harmful = {
        "NCCL_NTHREADS",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_IB_GDR_LEVEL",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_IB_DISABLE",
        "NCCL_BUFFSIZE",
    }
    assert harmful <= {each.name for each in removals(plan)}
    assert not any(name.startswith("NCCL_") for name in names(plan))


def test_a_network_without_rdma_may_keep_it_switched_off():
    plan = plan_of(JOB, "cluster.nodes=2", "cluster.network=10Gb/s")
    assert "NCCL_IB_DISABLE" not in {each.name for each in removals(plan)}


def test_every_variable_has_a_reason_that_stays_a_comment():
    for plan in (plan_of(JOB, *TWO_NODES), plan_of(TINY)):
        for line in export_lines(plan):
            if line.startswith("# "):  # why all that follow are unset
                continue
            command, reason = line.split("  # ", 1)
            assert reason
            assert command.split()[0] in ("export", "unset")
            assert "\n" not in line


def test_one_node_of_cpus_meets_over_the_loopback():
    found = {each.name: each.value for each in environment(plan_of(TINY))}
    assert found == {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_cores_of_this_machine_are_not_counted_for_other_nodes():
    plan = plan_of(TINY, "cluster.nodes=2")
    assert plan.cluster.cores_per_rank is not None
    (threads,) = (each for each in environment(plan) if each.name == "OMP_NUM_THREADS")
    assert threads.value == "1"
    assert "the job file does not give the cores" in threads.reason


def test_segments_grow_where_blocks_are_gathered_and_only_on_nvidia():
    assert "PYTORCH_ALLOC_CONF" in names(plan_of(JOB, "layout.sharding=full"))
    small = ("model={preset: gpt2}", "data.seq_len=1024", "layout={sharding: none, data: 8}")
    assert "PYTORCH_ALLOC_CONF" not in names(plan_of(JOB, *small))
    amd = plan_of(JOB, "layout.sharding=full", "cluster.accelerator=MI300X")
    assert "PYTORCH_ALLOC_CONF" not in names(amd)


def test_macs_lose_the_flag_that_wedges_the_gpu():
    plan = plan_of(TINY, "cluster={accelerator: M2-Ultra, nodes: 2, per_node: 1}")
    assert [each.name for each in removals(plan)] == ["MLX_METAL_FAST_SYNCH"]
    assert environment(plan) == []
    assert launch_command(plan).startswith("mlx.launch --hostfile hosts.json --backend ring --")

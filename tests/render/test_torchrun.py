import importlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.render.plans import planned, rendered

from paceline import render
from paceline.parallel.shrink import shrunk
from paceline.render import RenderError
from paceline.render.torchrun import least_nodes

FULL = {"sharding": "full"}


def launch(**changes):
    return rendered("torchrun", **changes).files["launch.sh"]


def what(found):
    return [gap.what for gap in found.gaps]


def test_s1_1_two_nodes_meet_at_the_head_and_never_at_localhost(check_golden):
    found = rendered("torchrun", layout=FULL)
    assert "localhost" not in found.files["launch.sh"]
    assert found.gaps == ()
    check_golden("torchrun/two-nodes", found)


def test_one_node_needs_no_head(check_golden):
    check_golden("torchrun/one-node", rendered("torchrun", cluster={"nodes": 1}))


def test_cpus_of_two_nodes_take_no_interface_for_granted(check_golden):
    cpus = {"accelerator": "cpu", "nodes": 2, "per_node": 2, "memory": "8 GiB"}
    found = rendered("torchrun", cluster=cpus, layout=FULL, train={"precision": "fp32"})
    check_golden("torchrun/cpus", found)


def test_a_job_that_may_not_shrink_waits_for_all_nodes():
    assert "--nnodes=2 " in launch(layout=FULL, recovery={"shrink": False})


def test_a_batch_that_fewer_nodes_cannot_divide_waits_for_all_nodes():
    # 30 samples over 3 x 2 ranks, 5 each; over 2 x 2 ranks they do not divide.
    changes = {"cluster": {"nodes": 3, "per_node": 2}, "train": {"global_batch": 30}}
    assert "--nnodes=3 " in launch(layout=FULL, **changes)


def test_fewer_nodes_than_the_state_fits_on_are_not_started():
    plan, job = planned(
        model={"decoder": None, "preset": "llama-3-8b"},
        data={"seq_len": 4096},
        cluster={"nodes": 4, "per_node": 1},
        layout=FULL | {"micro_batch": 1, "data": 4, "recompute": "full"},
        train={"global_batch": 12},
    )
    least = least_nodes(plan, job)
    assert 1 < least < 4
    state = 16 * plan.profile.num_parameters
    assert state / least < plan.limit_bytes
    assert state / (least - 1) > 0.7 * plan.limit_bytes  # and activations and gathered blocks


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(2, 6),
    per_node=st.sampled_from([1, 2, 4, 8]),
    micro=st.integers(1, 3),
    accumulation=st.sampled_from([1, 2, 12, 60]),
    sharding=st.sampled_from(["none", "zero2", "full"]),
)
def test_s1_1_every_number_of_nodes_in_the_range_trains_the_same_batch(
    nodes, per_node, micro, accumulation, sharding
):
    ranks = nodes * per_node
    plan, job = planned(
        cluster={"nodes": nodes, "per_node": per_node},
        train={"global_batch": ranks * micro * accumulation},
        layout={"sharding": sharding, "micro_batch": micro, "data": ranks},
    )
    for some in range(least_nodes(plan, job), nodes + 1):
        small = shrunk(plan.layout, some * per_node)
        assert small is not None
        assert small.num_ranks == some * per_node
        assert small.global_batch == plan.layout.global_batch
        assert small.micro_batch == plan.layout.micro_batch
        assert plan.layout.global_batch % (some * per_node * micro) == 0


def test_s1_1_restarts_are_those_that_the_job_allows():
    assert "--max-restarts=7 " in launch(recovery={"max_restarts": 7})


@pytest.mark.parametrize(
    ("layout", "gap"),
    [
        ({"tensor": 4}, "tensor 4"),
        ({"pipeline": 2}, "pipeline 2"),
        ({"context": 2}, "context 2"),
        ({"sharding": "zero1"}, "ZeRO-1 over 16 ranks"),
        ({"sharding": "full", "offload": "cpu"}, "optimizer state on cpu"),
    ],
)
def test_what_the_example_program_lacks_is_said(layout, gap):
    found = rendered("torchrun", layout=layout)
    assert what(found) == [gap]
    assert found.gaps[0].fix


def test_half_precision_without_a_scaler_is_a_gap():
    found = rendered("torchrun", train={"precision": "fp16"})
    assert what(found) == ["precision fp16"]


def test_accelerators_that_the_program_does_not_know_are_a_gap_not_a_run_on_the_cpu():
    found = rendered("torchrun", cluster={"accelerator": "Gaudi3"})
    assert what(found) == ["Gaudi3 through hccl"]


def test_macs_are_refused_with_the_engine_that_has_them():
    macs = {"accelerator": "M2-Ultra", "per_node": 1, "network": "auto"}
    with pytest.raises(RenderError) as refused:
        rendered("torchrun", cluster=macs, train={"precision": "fp32"})
    (problem,) = refused.value.problems
    assert "M2-Ultra" in problem.what
    assert "--for mlx" in problem.fix


def test_a_name_for_the_shell_stays_a_name(tmp_path):
    text = launch(cluster={"nodes": 1})
    marker = tmp_path / "hurt"
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > said\n')
    fake.chmod(0o755)
    script = tmp_path / "launch.sh"
    script.write_text(text)
    name = f"my train.py; touch {marker}"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TRAIN_SCRIPT": name, "NCCL_ALGO": "Ring"}
    subprocess.run(["bash", str(script), "--x", "$(id)"], env=environment, check=True)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[-3:] == [name, "--x", "$(id)"]
    assert not marker.exists()


def test_harmful_variables_do_not_reach_the_ranks(tmp_path):
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\nenv > said\n")
    fake.chmod(0o755)
    script = tmp_path / "launch.sh"
    script.write_text(launch(layout=FULL))
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HEAD_ADDRESS": "10.0.0.1",
        "RUN_ID": "a",
        "NCCL_ALGO": "Ring",
        "NCCL_NTHREADS": "4",
        "NCCL_NET_GDR_LEVEL": "5",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
    subprocess.run(["bash", str(script)], env=environment, check=True)
    said = (tmp_path / "said").read_text()
    assert "NCCL_ALGO" not in said
    assert "NCCL_NTHREADS" not in said
    assert "GDR_LEVEL" not in said
    assert "NCCL_SOCKET_IFNAME=eth1" in said  # what only the machine's owner can know stays
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said


@pytest.mark.parametrize(("planned_batches", "syncs"), [(1, [True, True]), (2, [False, True])])
def test_s1_16_on_fewer_nodes_the_example_holds_no_whole_gradients_that_the_plan_does_not(
    planned_batches, syncs, monkeypatch
):
    """One micro-batch as planned is reduced at once; fewer ranks, which have two, do so as well."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(render.__file__).parent / "scripts"))
    program = importlib.import_module("train_torchrun")
    seen: list[bool] = []

    class Sharded(torch.nn.Linear):
        def set_requires_gradient_sync(self, value: bool) -> None:
            seen.append(value)

    class Samples:
        def __init__(self, settings: object) -> None: ...
        def micro_batches(self, step: int, rank: int, world: int) -> list[object]:
            return [torch.ones(1, 2), torch.ones(1, 2)]

    model = Sharded(2, 1)
    monkeypatch.setattr(program, "wrap", lambda *_: model)
    monkeypatch.setattr(program, "resume", lambda *_: 0)
    monkeypatch.setattr(program, "say_end", lambda *_: None)
    for name, value in {
        "build": lambda _: model,
        "adamw": lambda *_: torch.optim.SGD(model.parameters()),
        "Samples": Samples,
        "learning_rate": lambda *_: 0.1,
        "loss_of": lambda model, tokens, _: model(tokens).mean(),
        "say_step": lambda *_: None,
    }.items():
        monkeypatch.setattr(program.lm, name, value)
    monkeypatch.setattr(program.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(program.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(program.dist, "all_reduce", lambda _: None)
    asked = {
        "precision": "fp32",
        "layout": {"reduces_every_micro_batch": False},
        "batch": {"accumulation": planned_batches},
        "router_loss": None,
        "clip_norm": None,
        "steps": 1,
        "checkpoint_every": 9,
    }
    program.train(asked, torch.device("cpu"))
    assert seen == syncs

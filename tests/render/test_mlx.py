import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.render.plans import planned, rendered

from paceline.errors import JobError, PacelineError, PlanError
from paceline.render import RenderError
from paceline.render.mlx import hostfile, mlx_backend, mlx_launch

MACS: dict[str, Any] = {"accelerator": "M3-Ultra", "nodes": 2, "per_node": 1, "network": "auto"}
PLAIN: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1, "recompute": "none"}


def macs(nodes: int, **layout: Any) -> dict[str, Any]:
    return {"cluster": MACS | {"nodes": nodes}, "layout": PLAIN | layout}


JACCL = MACS | {"rdma": True}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """`scripts/mlx_check.py`, as `launch.sh` starts it."""
    from paceline import render

    path = Path(render.__file__).parent / "scripts" / "mlx_check.py"
    spec = importlib.util.spec_from_file_location("mlx_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_macs_without_rdma_are_a_ring(check_golden):
    found = rendered("mlx", **macs(2))
    assert "--backend ring" in found.files["launch.sh"]
    check_golden("mlx/two-macs", found)


def test_no_flag_is_written_that_mlx_launch_lacks():
    for changes in (macs(4), macs(1), {"cluster": {"accelerator": "cpu", "nodes": 1}}):
        text = "\n".join(rendered("mlx", **changes).files.values())
        assert "--gpus" not in text
        assert "--nodes" not in text
        assert "--node-rank" not in text


def test_one_mac_starts_its_program_without_a_launcher(check_golden):
    found = rendered("mlx", **macs(1))
    assert "mlx.launch" not in found.files["launch.sh"]
    assert "hosts.json" not in found.files
    check_golden("mlx/one-mac", found)


def test_every_pair_of_macs_with_rdma_has_a_device(check_golden, check, tmp_path):
    hosts = hostfile(*planned(cluster=JACCL | {"nodes": 4}, layout=PLAIN))
    assert hosts["backend"] == "jaccl"
    for rank, host in enumerate(hosts["hosts"]):
        assert [device is None for device in host["rdma"]] == [rank == peer for peer in range(4)]
        devices = [device for device in host["rdma"] if device]
        assert len(set(devices)) == 3
    check_golden("mlx/four-macs-rdma", rendered("mlx", cluster=JACCL | {"nodes": 4}, layout=PLAIN))


def test_more_macs_than_ports_are_cabled_in_a_ring():
    train = {"global_batch": 56}
    seven, _ = planned(cluster=JACCL | {"nodes": 7}, layout=PLAIN, train=train)
    assert mlx_backend(seven) == "jaccl"
    plan, job = planned(cluster=JACCL | {"nodes": 8}, layout=PLAIN, train=train)
    assert mlx_backend(plan) == "jaccl-ring"
    for rank, host in enumerate(hostfile(plan, job)["hosts"]):
        peers = {peer for peer, device in enumerate(host["rdma"]) if device}
        assert peers == {(rank - 1) % 8, (rank + 1) % 8}


def test_ranks_of_this_machine_need_no_hostfile():
    plan, _ = planned(cluster={"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"})
    assert mlx_launch(plan) == [
        *("mlx.launch", "--hosts", "127.0.0.1", "-n", "2", "--backend", "ring", "--")
    ]


def test_sharding_on_a_ring_says_what_it_costs():
    found = rendered("mlx", **macs(2, sharding="full"))
    (gap,) = found.gaps
    assert gap.what == "reduce-scatter of the gradients"
    assert "twice the bytes" in (gap.nearest or "")


def test_sharding_with_rdma_lacks_nothing():
    assert rendered("mlx", cluster=JACCL, layout=PLAIN | {"sharding": "full"}).gaps == ()


def test_what_mlx_lacks_is_said_or_refused():
    for refused in ({"sharding": "zero2"}, {"pipeline": 3}, {"tensor": 3}):
        with pytest.raises(PlanError, match="does not write for mlx"):
            planned(cluster=MACS | {"nodes": 3}, layout=refused)
    with pytest.raises(PlanError, match="fp16"):
        planned(**macs(2), train={"precision": "fp16"})
    with pytest.raises(RenderError, match="a Mac has one GPU"):
        rendered("mlx", cluster=MACS | {"per_node": 2}, layout=PLAIN)
    with pytest.raises(RenderError, match="for Macs and CPUs"):
        rendered("mlx", layout=PLAIN | {"sharding": "none"})


def test_s4_3_macs_that_hold_the_state_are_enough_and_half_as_many_are_not():
    model = {"decoder": {"layers": 80, "hidden": 8192, "heads": 64}}
    train = {"global_batch": 16, "precision": "bf16"}
    asked = {"model": model, "train": train, "layout": {}}
    plan, _ = planned(cluster=MACS | {"nodes": 4, "memory": "512 GiB"}, **asked)
    # Parameters, gradients and two moments in float32, shared by four Macs: 16 bytes each.
    parts = plan.estimate.memory.parts
    state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(16 * plan.profile.num_parameters / 4, rel=0.01)
    assert plan.layout.sharding == "full"
    with pytest.raises(PlanError):
        planned(cluster=MACS | {"nodes": 2, "memory": "512 GiB"}, **asked)


def test_s4_3_unlike_macs_are_refused_with_the_one_that_limits():
    with pytest.raises(JobError, match="set accelerator to M2-Ultra and memory to"):
        planned(cluster=MACS | {"accelerator": "M3-Ultra + M2-Ultra"}, layout={})


def test_s4_2_rdma_is_a_field_of_the_job():
    plan, _ = planned(cluster=JACCL, layout=PLAIN)
    assert (mlx_backend(plan), plan.cluster.network_link) == ("jaccl", "thunderbolt-5-jaccl")
    plain, _ = planned(cluster=JACCL | {"rdma": False}, layout=PLAIN)
    assert (mlx_backend(plain), plain.cluster.network_link) == ("ring", "thunderbolt-5-tcp")
    assert plan.estimate.step_s < plain.estimate.step_s
    gpus = {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "rdma": False}
    tcp, _ = planned(cluster=gpus, layout={})
    assert not tcp.cluster.uses_rdma
    for wrong in (JACCL | {"accelerator": "M2-Ultra"}, {"accelerator": "cpu", "rdma": True}):
        with pytest.raises(JobError, match=r"T024: cluster\.rdma is true"):
            planned(cluster=wrong, layout={})


@pytest.mark.parametrize("engine", ["paceline", "mlx"])
def test_s4_2_macs_are_planned_with_what_mlx_has(engine):
    cluster, model = MACS | {"nodes": 3}, {"decoder": {"layers": 80, "hidden": 8192, "heads": 64}}
    train = {"global_batch": 12, "precision": "bf16"}
    plan, _ = planned(engine=engine, cluster=cluster, model=model, train=train, layout={})
    assert plan.engine == "mlx"
    assert plan.layout.data == plan.layout.num_ranks == 3
    assert plan.layout.sharding == "full"


def test_s4_2_mpi_is_a_choice_that_is_planned_over_tcp_and_written_for_mpirun(check, tmp_path):
    mpi = MACS | {"mlx_backend": "mpi"}
    found = rendered("mlx", cluster=mpi, layout=PLAIN)
    plan, _ = planned(cluster=mpi, layout=PLAIN)
    assert plan.cluster.network_link == "thunderbolt-5-tcp"
    launch = found.files["launch.sh"]
    assert 'mlx.launch --hostfile "$hostfile" --backend mpi --' in launch
    assert "--cwd" not in launch  # Open MPI 5 has no -cwd, which mlx.launch makes of it
    assert "command -v mpirun" in launch
    assert "OMPI_COMM_WORLD_RANK" in found.files["rank.sh"]
    assert "--backend ring" in found.files["hosts.sh"]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(found.files["hosts.json"].replace("192.0.2.", "10.0.0."))
    assert list(check.check_hosts(hosts, ranks=plan.cluster.num_nodes, backend="mpi")) == []


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        (JACCL | {"mlx_backend": "mpi", "rdma": True}, "T024: cluster.rdma is true"),
        (
            {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "mlx_backend": "mpi"},
            "L012: cluster.mlx_backend is mpi, and paceline cannot be asked for it",
        ),
    ],
)
def test_s4_2_a_backend_that_would_not_be_used_is_refused(cluster, problem):
    with pytest.raises(PacelineError, match=problem):
        planned(cluster=cluster, layout={})


def test_s4_2_mlx_on_nvidia_gpus_is_refused_with_the_reason():
    gpus = {"accelerator": "H100-SXM", "nodes": 1, "per_node": 2}
    plan, _ = planned(cluster=gpus, engine="mlx", layout=PLAIN)
    assert any("CUDA backend (mlx[cuda], NCCL)" in caution.what for caution in plan.cautions)
    with pytest.raises(RenderError, match=r"H002: .*CUDA backend"):
        rendered("mlx", cluster=gpus, engine="mlx", layout=PLAIN)


def test_s4_3_bf16_states_halve_what_a_mac_holds_of_each_parameter():
    layout = {"sharding": "none", "micro_batch": 1}

    def parts(**train: Any) -> dict[str, int]:
        plan, _ = planned(cluster=macs(2)["cluster"], engine="mlx", train=train, layout=layout)
        held = plan.estimate.memory.parts
        return {name: held[name] for name in ("parameters", "gradients", "optimizer")}

    wide, narrow = parts(precision="bf16"), parts(states="bf16")
    assert narrow == {name: size // 2 for name, size in wide.items()}
    # MLX's Adam makes its moments with zeros_like(parameter).
    assert narrow["optimizer"] == 2 * narrow["parameters"]


def test_s4_3_bf16_states_reach_the_program_and_are_refused_where_nothing_has_them():
    settings = json.loads(
        rendered("mlx", cluster=macs(2)["cluster"], train={"states": "bf16"}).files["train.json"]
    )
    assert (settings["states"], settings["precision"]) == ("bf16", "bf16")
    with pytest.raises(PlanError, match=r"L012: train\.states is bf16") as caught:
        planned(train={"states": "bf16"})
    # MLX has them, and does not train on the GPUs of this job.
    assert caught.value.problems[0].fix == "leave train.states out"


@pytest.mark.parametrize(("system", "expected"), [("Darwin", "-t 0 -l 0 "), ("Linux", "")])
@pytest.mark.parametrize("nodes", [1, 2])
def test_s4_20_a_program_on_a_mac_has_the_quality_of_service_of_a_waiting_person(
    tmp_path, system, expected, nodes
):
    files = rendered("mlx", **macs(nodes)).files
    script = "rank.sh" if nodes > 1 else "launch.sh"
    (tmp_path / script).write_text(files[script])
    # Programs of a Mac, and what they are started with.
    for name, text in {
        "uname": f"echo {system}",
        "python3": 'case "$*" in *mlx_check*) ;; *) echo "program $*" ;; esac',
        "taskpolicy": 'echo "taskpolicy $*"; shift 4; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = ["bash", script, *(["python3", "train.py"] if nodes > 1 else [])]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MLX_RANK": "0"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    started = [f"taskpolicy {expected}python3 train.py"] if expected else []
    assert [*started, "program train.py"] == done.stdout.split("\n\nrank")[0].splitlines()[:2]


def test_the_hostfile_as_rendered_is_refused_until_it_is_filled_in(check, tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(rendered("mlx", **macs(2)).files["hosts.json"])
    found = list(check.check_hosts(path, ranks=2, backend="ring"))
    assert len(found) == 2
    assert all("is an example" in each for each in found)
    path.write_text(path.read_text().replace("192.0.2.", "10.0.0."))
    assert list(check.check_hosts(path, ranks=2, backend="ring")) == []


def test_hosts_of_the_job_are_those_of_the_hostfile(check, tmp_path):
    path = tmp_path / "hosts.json"
    found = rendered("mlx", ssh={"hosts": ["me@10.0.0.7", "10.0.0.8", "10.0.0.9"]}, **macs(2))
    path.write_text(found.files["hosts.json"])
    hosts = json.loads(path.read_text())["hosts"]
    assert [(host["ssh"], host["ips"]) for host in hosts] == [
        ("me@10.0.0.7", ["10.0.0.7"]),
        ("10.0.0.8", ["10.0.0.8"]),
    ]
    assert list(check.check_hosts(path, ranks=2, backend="ring")) == []
    with pytest.raises(JobError, match="H021: the hostfile cannot be written: a is there twice"):
        rendered("mlx", ssh={"hosts": ["a", "a"]}, **macs(2))


def test_a_wrong_hostfile_is_said_with_the_place(check, tmp_path):
    def problems(hosts: Any, *, ranks: int = 2, backend: str = "ring") -> str:
        path = tmp_path / "hosts.json"
        path.write_text(json.dumps(hosts))
        return " / ".join(check.check_hosts(path, ranks=ranks, backend=backend))

    one, two = {"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}
    assert "a is listed twice, as host 0 and host 1" in problems([one, one])
    assert "10.0.0.1 is listed twice" in problems([one, two | {"ips": ["10.0.0.1"]}])
    assert "hosts.json: 1, ranks of the plan: 2" in problems([one])
    assert 'host 1 has no "ips"' in problems([one, {"ssh": "b"}])
    assert "'b.local' of host 1 is not an IP address" in problems([one, two | {"ips": ["b.local"]}])
    assert "has no list of hosts" in problems({"backend": "ring"})
    assert "is for the backend ring" in problems(
        {"backend": "ring", "hosts": [one, two]}, backend="jaccl"
    )
    mesh = [one | {"rdma": [None, None]}, two | {"rdma": ["rdma_en2", None]}]
    assert "host 0 has no RDMA device to host 1" in problems(mesh, backend="jaccl")
    itself = [one | {"rdma": ["rdma_en2", "rdma_en3"]}, two | {"rdma": ["rdma_en2", None]}]
    assert "device to itself" in problems(itself, backend="jaccl")
    (tmp_path / "no.json").write_text("{")
    assert "cannot be read" in next(
        check.check_hosts(tmp_path / "no.json", ranks=2, backend="ring")
    )


def test_s4_10_addresses_of_the_hostfile_are_called_from_the_macs(check, tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/bash\nwhile [[ "$1" != -- ]]; do shift; done\n'
        '[[ "$2" == off ]] && { echo "ssh: off: no route" >&2; exit 255; }\nexec bash -c "$3"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "hosts.json"

    def problems(*hosts: tuple[str, str], backend: str = "ring") -> list[str]:
        path.write_text(json.dumps([{"ssh": name, "ips": [address]} for name, address in hosts]))
        return list(check.check_reach(path, backend=backend, python=sys.executable))

    # No connection goes to the address of all hosts.
    good, bad = "127.0.0.1", "255.255.255.255"
    assert problems(("mac-0", good), ("mac-1", good), ("mac-2", good)) == []
    (found,) = problems(("mac-0", good), ("mac-1", bad), ("mac-2", good))
    assert found.startswith(f"mac-0 does not reach {bad}: ")
    found = problems(("mac-0", bad), ("mac-1", good), ("mac-2", good), backend="jaccl")
    assert [each.split(":")[0] for each in found] == [
        f"mac-{mac} does not reach {bad}" for mac in (1, 2)
    ]
    (found,) = problems(("mac-0", good), ("off", good))
    assert "off cannot be asked: ssh: off: no route" in found


def _end(rank: int, sha256: str = "a", world_size: int = 2) -> str:
    end = {"rank": rank, "world_size": world_size, "wrapper": "w", "sharded": 0, "sha256": sha256}
    return json.dumps(end) + f"\nrank {rank} ended with 0\n"


def test_a_run_counts_only_when_every_rank_ended_well(check):
    def problems(log: str) -> str:
        return " / ".join(check.check_run(log, ranks=2))

    assert problems(_end(0) + _end(1)) == ""
    assert problems("rank 0 ended with 0\nrank 1 ended with 0\n") == ""
    assert "rank 1 never said how it ended" in problems(_end(0))
    assert "rank 1 ended with exit code 3" in problems(_end(0) + "rank 1 ended with 3\n")
    assert "the parameters of the ranks differ" in problems(_end(0) + _end(1, "b"))
    assert "ranks counted [1] ranks in all" in problems(_end(0, "a", 1) + _end(1, "a", 1))
    assert "1 of 2 ranks gave a hash" in problems(_end(0) + "rank 1 ended with 0\n")

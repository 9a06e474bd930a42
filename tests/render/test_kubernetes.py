import os
import re
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.render.plans import planned, rendered

from paceline.errors import JobError
from paceline.render import RenderError
from paceline.render.kubernetes import objects
from paceline.render.pod import PLACEHOLDER, name_of

FULL = {
    "image": "registry.internal/train:1",
    "namespace": "training",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": ["nvidia.com/gpu"],
    "rdma_resource": "rdma/hca_shared_devices_a",
    "network": "nets/ib0",
    "claim": "shared",
    "secrets": {"HF_TOKEN": "hf/token"},
    "max_run": "12h",
}


def kinds(found):
    names = ("trainjob.yaml", "pytorchjob.yaml", "program.yaml")
    return {each["kind"]: each for name in names for each in yaml.safe_load_all(found.files[name])}


def pod(found):
    replicas = kinds(found)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    return replicas["Master"]["template"]["spec"]


def test_s4_6_two_nodes_with_rdma(check_golden):
    check_golden(
        "kubernetes/two-nodes", rendered("kubernetes", layout={"sharding": "full"}, kubernetes=FULL)
    )


def test_a_runtime_that_the_cluster_has_is_patched(check_golden):
    settings = FULL | {"runtime": "torch-distributed"}
    check_golden("kubernetes/cluster-runtime", rendered("kubernetes", kubernetes=settings))


def test_one_node_of_cpus_without_settings(check_golden):
    cpu = {"accelerator": "cpu", "nodes": 1, "per_node": 4, "network": "auto"}
    check_golden("kubernetes/cpu", rendered("kubernetes", cluster=cpu))


def test_pods_without_rdma_devices_say_what_tcp_makes_of_the_planned_step():
    (gap,) = [
        each
        for each in rendered("kubernetes", cluster={"network": "400Gb/s InfiniBand"}).gaps
        if each.where == "kubernetes.rdma_resource"
    ]
    assert re.search(r"the planned [\d.]+ m?s a step become [\d.]+ to [\d.]+ times", gap.line)
    assert "; fix: kubernetes.rdma_resource" in gap.line


def test_ranks_and_nodes_are_said_where_each_kind_reads_them():
    found = kinds(rendered("kubernetes", kubernetes=FULL))
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert found["TrainingRuntime"]["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert found["PyTorchJob"]["spec"]["nprocPerNode"] == "8"


def test_s4_6_a_pod_may_pin_memory_only_where_it_has_rdma():
    with_rdma, without = (rendered("kubernetes", kubernetes=each) for each in (FULL, {}))
    (container,) = pod(with_rdma)["containers"]
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert "securityContext" not in pod(without)["containers"][0]


def test_s4_6_shared_memory_is_larger_than_a_containers_own():
    (shm,) = [each for each in pod(rendered("kubernetes"))["volumes"] if each["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}  # 1 GiB a rank


def test_secrets_are_named_and_never_written():
    found = rendered("kubernetes", kubernetes=FULL)
    (variable,) = [
        each for each in pod(found)["containers"][0]["env"] if each["name"] == "HF_TOKEN"
    ]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert "value" not in variable


@pytest.mark.parametrize("value", ["hf_abcdefghijklmnop", "hf/", "/token", "a/b/c", "HF/token"])
def test_what_is_no_name_of_a_secret_is_refused(value):
    with pytest.raises(JobError, match=r"secrets"):
        planned(kubernetes={"secrets": {"HF_TOKEN": value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "Registry/Train"),
        ("image", "a b"),
        ("namespace", "My_Space"),
        ("claim", "$(rm -rf /)"),
        ("rdma_resource", "rdma hca"),
        ("node_selector", {"a b": "c"}),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_with_its_key(key, value):
    with pytest.raises(JobError, match=rf"kubernetes\.{key}"):
        planned(kubernetes={key: value})


def test_without_an_image_the_files_have_one_that_no_cluster_takes():
    found = rendered("kubernetes")
    assert pod(found)["containers"][0]["image"] == PLACEHOLDER
    assert not re.fullmatch(r"[a-z0-9._:/@-]+", PLACEHOLDER)
    (gap,) = [gap for gap in found.gaps if "image" in gap.what]
    assert "kubernetes.image" in gap.fix


def test_a_name_that_kubernetes_does_not_take_is_changed_and_said():
    found = rendered("kubernetes", name="My.Job_1")
    assert kinds(found)["TrainJob"]["metadata"]["name"] == "my-job-1"
    (gap,) = [gap for gap in found.gaps if "name" in gap.what]
    assert (gap.what, gap.nearest) == ("the name My.Job_1", "my-job-1")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_every_name_of_a_job_becomes_one_that_leaves_room(name):
    _, job = _NAMED
    changed = type(job.spec)(**{**_fields(job.spec), "name": name})
    found = name_of(type(job)(spec=changed, folder=job.folder, source="x", lines={}))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", found)


_NAMED = planned()


def _fields(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_rdma_that_the_pods_do_not_ask_for_is_said():
    (gap,) = [
        gap
        for gap in rendered("kubernetes", cluster={"network": "400Gb/s InfiniBand"}).gaps
        if "RDMA" in gap.what
    ]
    assert "TCP" in (gap.nearest or "")


def test_an_accelerator_that_nobody_counts_is_refused():
    with pytest.raises(RenderError, match=r"kubernetes\.accelerator_resource"):
        rendered("kubernetes", cluster={"accelerator": "Gaudi2"})


def test_a_split_that_the_program_lacks_is_refused_unless_the_image_has_its_own():
    with pytest.raises(RenderError, match=r"tensor 8.*\n.*\n.*\n.*kubernetes\.script"):
        rendered("kubernetes", layout={"tensor": 8})
    found = rendered("kubernetes", layout={"tensor": 8}, kubernetes={"script": "/app/train.py"})
    assert kinds(found)["TrainJob"]["spec"]["trainer"]["command"] == ["torchrun", "/app/train.py"]


def test_what_is_submitted_is_what_is_rendered():
    plan, job = planned(kubernetes=FULL)
    found = kinds(rendered("kubernetes", kubernetes=FULL))
    submitted = objects(plan, job)
    assert [each["kind"] for each in submitted] == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    assert submitted == [found[each["kind"]] for each in submitted]
    plan, job = planned(kubernetes=FULL | {"api": "pytorchjob"})
    assert [each["kind"] for each in objects(plan, job)] == ["ConfigMap", "PyTorchJob"]


MLX = {"kubernetes": {"runtime": "mlx-distributed"}, "engine": "mlx"}


def test_s4_2_kubeflows_runtime_of_mlx_starts_nccl_ranks_on_every_gpu():
    found = rendered("kubernetes", **MLX)
    assert {"program.yaml", "trainjob.yaml", "start.sh", "rank.sh", "train.py"} <= set(found.files)
    assert "pytorchjob.yaml" not in found.files
    job = yaml.safe_load(found.files["trainjob.yaml"])["spec"]
    assert job["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert job["runtimeRef"]["name"] == "mlx-distributed"
    assert (job["trainer"]["numNodes"], job["trainer"]["numProcPerNode"]) == (2, 8)
    assert job["trainer"]["command"] == ["bash", "/job/start.sh"]
    (patch,) = job["runtimePatches"]
    patched = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [each["name"] for each in patched] == ["node", "launcher"]
    assert "import mlx.core" in found.files["train.py"]
    assert "-np 16" in found.files["start.sh"]
    assert any("was run on no GPU here" in gap.why for gap in found.gaps)


def test_s4_2_mpiruns_ranks_become_ranks_of_mlx_over_nccl(tmp_path):
    files = rendered("kubernetes", **MLX).files
    start = files["start.sh"].replace("/etc/mpi/hostfile", f"{tmp_path}/hostfile")
    rank = files["rank.sh"].replace("cd /workspace", f"cd {tmp_path}")
    (tmp_path / "hostfile").write_text("localhost slots=8\nother slots=8\n")
    fakes = {
        "mpirun": 'echo "$@"; OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=16 '
        f"OMPI_COMM_WORLD_LOCAL_RANK=1 bash {tmp_path}/rank.sh",
        "python3": "env",
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name, text in (("start.sh", start), ("rank.sh", rank)):
        (tmp_path / name).write_text(text)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", tmp_path / "start.sh"], env=path, capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert "-x NCCL_HOST_IP -x NCCL_PORT" in told[0]
    assert {"MLX_RANK=9", "MLX_WORLD_SIZE=16", "CUDA_VISIBLE_DEVICES=1"} <= set(told)
    assert any(re.fullmatch(r"NCCL_HOST_IP=(127\.0\.0\.1|::1)", line) for line in told)
    assert not any(line.startswith("OMPI_COMM_WORLD_RANK") for line in told)


def test_s4_2_the_runtime_of_mlx_takes_no_other_engine():
    with pytest.raises(RenderError, match="it starts MLX on NVIDIA GPUs with mpirun") as caught:
        rendered("kubernetes", kubernetes={"runtime": "mlx-distributed"})
    assert caught.value.problems[0].where.startswith("kubernetes.runtime")

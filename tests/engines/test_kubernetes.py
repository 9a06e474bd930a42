"""The Kubernetes files against the definitions of their kinds, where no unknown key passes."""

import copy
import json

import pytest
from tests.engines.crds import documents, problems
from tests.engines.runs import start
from tests.render.plans import rendered

ALL = {
    "image": "registry.internal/train:1",
    "namespace": "training",
    "accelerator_resource": "nvidia.com/gpu",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": ["nvidia.com/gpu"],
    "service_account": "trainer",
    "rdma_resource": "openshift.io/mlnxnics",
    "rdma_devices": 8,
    "network": "nets/ib0",
    "shm": "16 GiB",
    "claim": "shared",
    "secrets": {"HF_TOKEN": "hf/token"},
    "max_run": "2d",
}
CPU = {"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"}


@pytest.mark.engine(validated="definitions of Trainer 2.3 and training operator 1.9, closed")
@pytest.mark.parametrize("runtime", [None, "torch-distributed"])
@pytest.mark.parametrize("cluster", [{}, {"nodes": 1}, {"accelerator": "MI300X"}, CPU])
@pytest.mark.parametrize("settings", [{}, ALL])
def test_every_object_keeps_to_its_definition(settings, cluster, runtime, python_with):
    files = rendered(
        "kubernetes", cluster=cluster, kubernetes=settings | {"runtime": runtime}
    ).files
    found = documents(files["trainjob.yaml"]) + documents(files["pytorchjob.yaml"])
    kinds = ["TrainJob", "PyTorchJob"] if runtime else ["TrainingRuntime", "TrainJob", "PyTorchJob"]
    assert [each["kind"] for each in found] == kinds
    assert problems(python_with("jsonschema"), *found) == []


@pytest.mark.engine(validated="definition of Trainer 2.3's TrainJob, closed: not run, no GPU")
@pytest.mark.parametrize("settings", [{}, ALL])
def test_s4_2_the_trainjob_of_mlx_keeps_to_its_definition(settings, python_with):
    named = settings | {"runtime": "mlx-distributed"}
    files = rendered("kubernetes", kubernetes=named, engine="mlx").files
    found = documents(files["trainjob.yaml"])
    assert [each["kind"] for each in found] == ["TrainJob"]
    assert problems(python_with("jsonschema"), *found) == []


@pytest.mark.engine(validated="a key too many is found anywhere in an object")
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("TrainJob", ("spec", "trainer")),
        ("TrainJob", ("spec",)),
        ("TrainingRuntime", ("spec", "mlPolicy", "torch")),  # numProcPerNode, until 2.2
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Master", "template", "spec")),
    ],
)
def test_the_check_finds_a_key_that_is_not_there_any_more(kind, place, python_with):
    files = rendered("kubernetes", kubernetes=ALL).files
    found = documents(files["trainjob.yaml"]) + documents(files["pytorchjob.yaml"])
    (wrong,) = copy.deepcopy([each for each in found if each["kind"] == kind])
    inner = wrong
    for key in place:
        inner = inner[key]
    inner["numProcPerNodes"] = 8
    (said,) = problems(python_with("jsonschema"), wrong)
    assert said.startswith(".".join(place))
    assert "numProcPerNodes" in said


@pytest.mark.engine(validated="kubernetes-validate --strict (ConfigMap; the pods, as Pods)")
@pytest.mark.parametrize("settings", [{}, ALL])
def test_pods_and_configmap_are_kubernetes_own(settings, python_with, tmp_path):
    python = python_with("kubernetes-validate")
    files = rendered("kubernetes", kubernetes=settings).files
    (program,) = documents(files["program.yaml"])
    (job,) = documents(files["pytorchjob.yaml"])
    for name, each in job["spec"]["pytorchReplicaSpecs"].items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}}
        pod["metadata"] |= each["template"].get("metadata", {})
        (tmp_path / f"{name}.json").write_text(json.dumps(pod | {"spec": each["template"]["spec"]}))
    (tmp_path / "program.json").write_text(json.dumps(program))
    for path in sorted(tmp_path.glob("*.json")):
        start(["kubernetes-validate", "--strict", path.name], tmp_path, python=python)

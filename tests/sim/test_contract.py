"""NCCL's contract in sentences, held by the double; what one rank can show also by real NCCL.

PACELINE_CONTRACT=nccl pytest tests/sim/test_contract.py -k one_rank      (on a GPU)
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from paceline.runtime._torch_private import number_ranks

pytestmark = pytest.mark.ranks

BACKEND = os.environ.get("PACELINE_CONTRACT", "nccl_double")
DEVICE = "cuda" if BACKEND == "nccl" else "sim"
only_double = pytest.mark.skipif(BACKEND == "nccl", reason="needs two devices, or the double")

FAR = timedelta(seconds=60)
_HOLD_CYCLES = 10**9
"""For `torch.cuda._sleep`: about half a second."""


MIXED = f"cpu:gloo,{DEVICE}:{BACKEND}"


def group(backend: str = BACKEND, timeout: timedelta = FAR):
    """A group of all ranks; the default one stays gloo, for what the test itself has to agree."""
    if backend != "nccl":
        from tests.sim.backend import install

        install()
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return dist.new_group(backend=backend, timeout=timeout)


@contextmanager
def held():
    """The current stream stands still inside; real CUDA's for half a second."""
    if DEVICE == "cuda":
        torch.cuda._sleep(_HOLD_CYCLES)
        yield
        return
    go = threading.Event()
    torch.sim.current_stream().put(go.wait)
    try:
        yield
    finally:
        go.set()


def part(group):
    """What sends a group's device tensors."""
    return group._get_backend(torch.device(DEVICE))


def raised(call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


# ---- one rank


def see_alone(rank: int, world: int) -> dict:
    """What one rank finds out by itself."""
    own, found = group(), {}
    value = torch.ones(2, device=DEVICE)
    dist.all_reduce(value, group=own)  # makes the communicator
    value.tolist()
    with held():
        work = dist.all_reduce(value, group=own, async_op=True)
        found["done at the call's return"] = work.is_completed()
    work.wait()  # the current stream waits for the collective's; without it the read may come first
    found["read"] = value.tolist()
    far, near = torch.ones(1, device=DEVICE), torch.zeros(1)
    if DEVICE == "cuda":
        near = near.pin_memory()  # out here: to pin memory may wait for the device
    with held():
        near.copy_(far, non_blocking=True)
        found["copy before the synchronisation"] = near.item()
    torch.get_device_module(DEVICE).synchronize()
    found["copy after it"] = near.item()
    found["host tensor"] = raised(lambda: dist.all_reduce(torch.ones(1), group=own))
    backend = part(own)
    work = dist.all_reduce(value, group=own, async_op=True)
    backend.abort()
    found["completed"] = work.is_completed() or work.wait()
    found["waited"] = work.wait(timedelta(seconds=1))
    found["error"] = backend.get_error().name
    found["next call"] = raised(lambda: dist.all_reduce(value, group=own))
    again, summed = group(), torch.full((2,), 3.0, device=DEVICE)
    dist.all_reduce(summed, group=again)
    found["summed again"] = summed.tolist()
    return found


@pytest.fixture(scope="module")
def alone() -> dict:
    (found,) = run_ranks(see_alone, 1)
    return found


def test_one_rank_a_collective_returns_before_its_data_is_there(alone):
    assert alone["done at the call's return"] is False
    assert alone["read"] == [1.0, 1.0]


def test_one_rank_a_copy_that_does_not_block_is_there_after_a_synchronisation(alone):
    assert alone["copy before the synchronisation"] == 0.0
    assert alone["copy after it"] == 1.0


def test_one_rank_a_host_tensor_is_refused(alone):
    assert "No backend type associated with device type cpu" in alone["host tensor"]


def test_one_rank_after_an_abort_nothing_says_so_but_the_next_call(alone):
    assert alone["completed"] is True
    assert alone["waited"] is True
    assert alone["error"] == "SUCCESS"
    assert "aborted" in alone["next call"]


def test_one_rank_after_an_abort_another_group_can_be_made_in_the_process(alone):
    assert alone["summed again"] == [3.0, 3.0]


def see_splits(rank: int, world: int) -> list[list[float]]:
    """A default group bound to the device, and another one in the same process, both split."""
    if DEVICE == "sim":
        from tests.sim.backend import install

        install()
    store, found = dist.distributed_c10d._get_default_store(), []
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            MIXED,
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=world,
            device_id=torch.device(DEVICE, 0),
        )
        number_ranks(dist.group.WORLD)
        split = dist.split_group(split_ranks=[[0]])
        for value in (torch.full((1,), 3.0, device=DEVICE), torch.ones(1)):
            dist.all_reduce(value, group=split)
            found.append(value.tolist())
    return found


def test_one_rank_a_later_default_group_of_the_process_can_be_split():
    assert run_ranks(see_splits, 1) == [[[3.0], [1.0]] * 2]


# ---- two ranks


def see_together(rank: int, world: int) -> dict:
    own, mixed, found = group(), group(MIXED), {}
    turns = Turns(rank)
    value = torch.full((2,), rank + 1.0, device="sim")
    if rank == 0:
        work = dist.all_reduce(value, group=own, async_op=True)
        found["early"] = (value * 1).tolist()  # without `wait` no stream waits for another
        turns.pass_on("sum")
        work.wait()
    else:
        turns.wait_for("sum")
        dist.all_reduce(value, group=own)
    found["sum"] = value.tolist()
    got = torch.full((2,), 7.0, device="sim")
    if rank == 0:
        dist.recv(got, src=1, group=own)  # returns before anything was sent
        turns.pass_on("send")
    else:
        turns.wait_for("send")
        dist.send(value, dst=0, group=own)
    found["received"] = got.tolist()
    host, far = torch.ones(2), torch.ones(2, device="sim")
    dist.all_reduce(host, group=mixed)
    dist.all_reduce(far, group=mixed)
    objects = [None, None]
    dist.all_gather_object(objects, rank, group=mixed)
    found["mixed"] = host.tolist(), far.tolist(), objects
    found["sequence"] = dict(part(own).sequence)
    return found


class Turns:
    """Rank 0's word to rank 1 that it may go on."""

    def __init__(self, rank: int) -> None:
        self._store = dist.distributed_c10d._get_default_store()

    def pass_on(self, name: str) -> None:
        self._store.set(name, "")

    def wait_for(self, name: str) -> None:
        self._store.wait([name])


@only_double
def test_two_ranks_see_sums_and_messages_when_they_have_come_and_not_before():
    zero, one = run_ranks(see_together, 2)
    assert 3.0 not in zero["early"]  # NaN once it is in flight
    assert zero["sum"] == one["sum"] == zero["received"] == [3.0, 3.0]
    assert one["mixed"] == ([2.0, 2.0], [2.0, 2.0], [0, 1])
    assert zero["sequence"] == {"enqueued": 1, "finished": 1}


def see_abort(rank: int, world: int, after: str) -> dict:
    os.environ["NCCL_DOUBLE_AFTER_ABORT"] = after
    own, turns, found = group(), Turns(rank), {}
    if rank == 1:
        turns.wait_for("over")  # and sends nothing
        return found
    got, summed = (torch.full((2,), 7.0, device="sim") for _ in range(2))
    dist.recv(got, src=1, group=own)
    dist.all_reduce(summed, group=own)
    behind = summed + 1
    found["sequence"] = dict(part(own).sequence)
    part(own).abort()
    found["read"] = got.tolist(), summed.tolist(), behind.tolist()
    found["error"] = part(own).get_error().name
    turns.pass_on("over")
    return found


@only_double
@pytest.mark.parametrize("after", ["own", "nan"])
def test_after_an_abort_what_was_queued_runs_on_garbage_and_nothing_raises(after):
    found = run_ranks(see_abort, 2, after)[0]
    got, summed, behind = found["read"]
    if after == "own":
        assert (got, summed, behind) == ([7.0, 7.0], [7.0, 7.0], [8.0, 8.0])
    else:
        assert all(each != each for each in (*got, *summed, *behind))
    assert found["error"] == "SUCCESS"
    assert found["sequence"] == {"enqueued": 1, "finished": 0}


def see_contagion(rank: int, world: int, contagion: str) -> float | None:
    os.environ["NCCL_DOUBLE_CONTAGION"] = contagion
    own, turns = group(), Turns(rank)
    votes = torch.ones(1, device="sim")
    if rank == 2:
        turns.wait_for("over")  # and never votes
        return None
    dist.all_reduce(votes, group=own)
    if rank == 1:
        turns.wait_for("wait")
        part(own).abort()
        torch.sim.synchronize()
        turns.pass_on("aborted")
        return None
    turns.pass_on("wait")
    if contagion == "0":
        turns.wait_for("aborted")
        part(own).abort()
    read = votes.item()
    turns.pass_on("over")
    return read


@only_double
def test_one_ranks_abort_completes_anothers_sum_with_garbage():
    assert run_ranks(see_contagion, 3, "1")[0] == 3.0
    assert run_ranks(see_contagion, 3, "0")[0] == 1.0


def see_limits(rank: int, world: int) -> dict:
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "0"
    brief, long, turns, found = group(timeout=timedelta(seconds=0.2)), group(), Turns(rank), {}
    if rank == 1:
        turns.wait_for("over")
        return found
    works = [
        dist.all_reduce(torch.ones(1, device="sim"), group=each, async_op=True)
        for each in (brief, long)
    ]
    while part(brief).get_error().name == "SUCCESS":
        time.sleep(0.01)
    found["errors"] = part(brief).get_error().name, part(long).get_error().name
    found["wait"] = raised(lambda: works[1].wait(timedelta(milliseconds=10)))
    turns.pass_on("over")
    return found


@only_double
def test_a_time_limit_is_a_groups_own_and_a_wait_with_a_limit_raises():
    found = run_ranks(see_limits, 2)[0]
    assert found["errors"] == ("TIMEOUT", "SUCCESS")
    assert "timeout" in found["wait"]


# ---- the watchdog, which may end the process


WATCHED = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from tests.sim.backend import install
install()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("nccl_double", store=store, rank=0, world_size=2)
own = dist.distributed_c10d._get_default_group()._get_backend(torch.device("sim"))
own.wire.store.set("pid/1", sys.argv[2])
dist.all_reduce(torch.ones(1, device="sim"))
while own.get_error().name == "SUCCESS":
    time.sleep(0.01)
time.sleep(float(sys.argv[3]))
print(own.get_error().name, flush=True)
os._exit(0)
"""


def watched(folder: Path, handling: str, *, stays_s: float) -> "subprocess.CompletedProcess[str]":
    """A rank whose only peer is a process that has ended, over a network that notices."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            WATCHED,
            folder / "store",
            str(gone.pid),
            str(stays_s),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NCCL_DOUBLE_PEER_DEATH": "error",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling,
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


@only_double
def test_the_watchdog_ends_a_process_that_ignores_an_error(tmp_path):
    assert watched(tmp_path, "3", stays_s=30).returncode == -signal.SIGABRT


@only_double
def test_a_process_that_turned_the_watchdog_off_reads_the_error_and_lives(tmp_path):
    done = watched(tmp_path, "0", stays_s=0)
    assert (done.returncode, done.stdout) == (0, "COMM_ERROR\n")

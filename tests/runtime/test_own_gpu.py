"""A rank whose GPU is not there says so before it builds anything."""

from types import SimpleNamespace

import pytest
import torch

from paceline.control.policy import cause_of
from paceline.errors import JobError
from paceline.runtime import own_gpu
from paceline.runtime.own_gpu import check_own_gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(own_gpu, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("PACELINE_GPUS", raising=False)
    shows(monkeypatch, "aa", "bb")


def shows(monkeypatch, *uuids):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    named = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", named.__getitem__)


def test_a_gpu_that_is_there_passes():
    check_own_gpu(1, is_first=True)


def test_a_rank_without_a_gpu_ends_the_run_with_the_numbers():
    with pytest.raises(JobError) as refused:
        check_own_gpu(3, is_first=True)
    (problem,) = refused.value.problems
    assert problem.code == "R062"
    assert problem.what == "rank 3 needs GPU 3; CUDA_VISIBLE_DEVICES='0,1' shows 2"
    assert "cluster.per_node to 2" in problem.fix


def refusal(local_rank):
    with pytest.raises(JobError) as refused:
        check_own_gpu(local_rank, is_first=True)
    (problem,) = refused.value.problems
    return problem


def test_a_machine_without_a_driver_blames_no_variable(monkeypatch, tmp_path):
    monkeypatch.setattr(own_gpu, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    problem = refusal(0)
    assert problem.what == (
        "rank 3 needs GPU 0; no NVIDIA driver is loaded here, so there is no GPU"
    )
    assert "cluster.accelerator to cpu" in problem.fix
    assert "CUDA_VISIBLE_DEVICES" not in problem.what + problem.fix


def test_a_torch_without_cuda_is_what_is_replaced(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    problem = refusal(0)
    assert "was built without CUDA" in problem.what
    assert "CUDA_VISIBLE_DEVICES" not in problem.what + problem.fix


def test_a_variable_that_is_not_set_is_not_named(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    problem = refusal(3)
    assert problem.what == "rank 3 needs GPU 3; PyTorch shows 2"
    assert "CUDA_VISIBLE_DEVICES" not in problem.fix


def test_a_gpu_that_disappears_in_a_run_counts_as_broken_hardware():
    with pytest.raises(RuntimeError, match="disappeared: rank 3 needs GPU 3") as lost:
        check_own_gpu(3, is_first=False)
    assert cause_of(str(lost.value)) == "accelerator"


def test_a_neighbours_gpu_under_the_number_of_a_lost_one_is_not_taken(monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "GPU-aa,GPU-bb,GPU-cc")
    shows(monkeypatch, "aa", "cc")
    check_own_gpu(0, is_first=False)
    with pytest.raises(RuntimeError, match="GPU-bb is gone, and 2 of 3 are left") as lost:
        check_own_gpu(1, is_first=False)
    assert cause_of(str(lost.value)) == "accelerator"


@pytest.mark.parametrize("known", ["GPU-aa,GPU-bb", "GPU-bb,GPU-aa", "MIG-1,MIG-2"])
def test_nothing_is_refused_where_no_gpu_is_lost_or_uuids_are_of_another_kind(monkeypatch, known):
    monkeypatch.setenv("PACELINE_GPUS", known)
    for local_rank in (0, 1):
        check_own_gpu(local_rank, is_first=False)

"""What keeps ranks from their GPUs is found before a run, from the kernel's and PyTorch's files."""

from dataclasses import replace

import pytest
from tests.clusters import h100s
from tests.preflight.machines import H100, NOTE, ON_8_H100, answers

from paceline.check.preflight.preflight import Preflight, judge
from paceline.check.preflight.result import Status
from paceline.launch.local import own_gpus
from paceline.topology.node.facts import GpuTexts, NodeFacts, TorchBuild
from paceline.topology.node.probe_gpu import find_uuids

TORCH = TorchBuild(
    version="2.11.0+cu126", cuda="12.6", nccl_wanted="nvidia-nccl-cu12==2.28.9", nccl="2.28.9"
)
NODE = replace(H100, torch_build=TORCH)
NEED = replace(ON_8_H100, num_nodes=1)


def before_a_run(node: NodeFacts, **need: object) -> Preflight:
    return judge(replace(answers(node), is_quick=True), replace(NEED, **need), note=NOTE)


def with_gpus(**changes: object) -> NodeFacts:
    return replace(NODE, gpu=replace(NODE.gpu, **changes))


def only_fail(verdict: Preflight) -> tuple[str, str | None, str, str]:
    (found,) = verdict.failing
    return found.name, found.id, found.evidence, found.fix


def test_a_node_with_all_its_gpus_passes():
    verdict = before_a_run(NODE)
    assert verdict.is_fit
    assert {"accelerators", "driver", "nccl"} <= {
        each.name for each in verdict.results if each.status is Status.PASS
    }


def test_a_gpu_that_disappeared_is_counted():
    node = with_gpus(device_files=tuple(f"/dev/nvidia{n}" for n in (0, 1, 2, 3, 5, 6, 7)))
    name, id, said, fix = only_fail(before_a_run(node))
    assert (name, id) == ("accelerators", "too-few-accelerators")
    assert said == "7 GPUs here; the job puts 8 ranks here, each needs a GPU of its own"
    assert "set cluster.per_node to 7" in fix


@pytest.mark.parametrize(
    ("visible", "seen"), [("0,1", 2), ("", 0), ("0,1,9,2", 2), ("GPU-6a,GPU-6b,GPU-6c", 3)]
)
def test_a_variable_that_hides_gpus_is_shown_with_both_counts(visible, seen):
    name, id, said, fix = only_fail(before_a_run(with_gpus(visible=visible)))
    assert (name, id) == ("accelerators", "invalid-device-ordinal")
    assert said == (
        f"CUDA_VISIBLE_DEVICES={visible!r} shows {seen} of 8 GPUs; the job puts 8 ranks here"
    )
    assert "unset CUDA_VISIBLE_DEVICES, or name 8 GPUs of this machine in it" in fix
    instead = f"set cluster.per_node to {seen}" if seen else "set cluster.accelerator to cpu"
    assert fix.endswith(instead)


def test_uuids_of_another_machine_do_not_count_as_visible():
    uuids = tuple(f"GPU-{number:08x}-6a91" for number in range(8))
    assert before_a_run(with_gpus(uuids=uuids, visible=",".join(uuids))).is_fit
    moved = ",".join([*uuids[:7], "GPU-ffffffff-6a91"])
    _, id, said, _ = only_fail(before_a_run(with_gpus(uuids=uuids, visible=moved)))
    assert id == "invalid-device-ordinal"
    assert "shows 7 of 8 GPUs" in said


def test_uuids_are_read_from_the_drivers_files_or_not_at_all(tmp_path):
    for bus, uuid in (("0000:01:00.0", "GPU-6a91-13"), ("0000:02:00.0", "GPU-6b")):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nVideo BIOS: ??\n"
        (tmp_path / bus / "information").write_text(text)
    assert find_uuids(tmp_path) == ("GPU-6a91-13", "GPU-6b")
    (tmp_path / "0000:02:00.0" / "information").write_text("GPU UUID: GPU-????????\n")
    assert find_uuids(tmp_path) == ()


def test_a_gpu_named_twice_is_two_ranks_on_one_gpu():
    name, id, said, _ = only_fail(before_a_run(with_gpus(visible="0,1,2,3,4,5,6,0")))
    assert (name, id) == ("accelerators", "duplicate-gpu")
    assert "names GPU 0 twice" in said


def test_a_driver_too_old_for_torch_is_named_with_the_one_it_needs():
    node = replace(NODE, torch_build=replace(TORCH, cuda="13.0"))
    name, id, said, fix = only_fail(before_a_run(node))
    assert (name, id) == ("driver", "accelerator-not-usable")
    assert said == (
        "driver 550.54.15 is too old: torch is for CUDA 13.0, which needs 580.65.06 or newer"
    )
    assert "older CUDA" in fix


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            replace(TORCH, nccl=None),
            "torch 2.11.0+cu126 needs nvidia-nccl-cu12==2.28.9, which is not installed",
        ),
        (
            TorchBuild(version="2.11.0+cpu"),
            "torch 2.11.0+cpu was built without CUDA and NCCL; the plan's ranks are on H100-SXM",
        ),
    ],
)
def test_a_missing_nccl_is_found_before_torch_is_imported(torch, said):
    for quick in (True, False):
        seen = replace(answers(replace(NODE, torch_build=torch)), is_quick=quick)
        name, id, evidence, fix = only_fail(judge(seen, NEED, note=NOTE))
        assert (name, id, evidence) == ("nccl", "accelerator-not-usable", said)
        assert fix.startswith("pip install")


def test_a_machine_without_a_driver_is_no_place_for_a_job_on_gpus():
    _, id, said, fix = only_fail(before_a_run(replace(NODE, gpu=GpuTexts())))
    assert id == "too-few-accelerators"
    assert said == "no NVIDIA or AMD driver is loaded; the job puts 8 ranks here"
    assert "--gpus all" in fix


def test_jobs_on_cpus_and_gpus_that_cannot_be_counted_are_not_kept_from_starting():
    assert before_a_run(
        replace(NODE, gpu=GpuTexts()), accelerator="cpu", backend="gloo", rank_bytes=10**9
    ).is_fit
    amd = GpuTexts(kernel_driver="6.8.5", device_files=("/dev/kfd",))
    rocm = TorchBuild(version="2.11.0+rocm6.4", hip="6.4")
    assert before_a_run(replace(NODE, gpu=amd, torch_build=rocm)).is_fit


def test_ray_shows_the_agent_other_gpus_than_the_task_that_looks():
    assert before_a_run(with_gpus(visible=""), reads_visible=False).is_fit


@pytest.mark.parametrize(
    ("visible", "shares"),
    [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,GPU-d", None)],
)
def test_simulated_nodes_of_one_machine_have_gpus_of_their_own(visible, shares):
    cluster = h100s(num_nodes=2, ranks_per_node=2, is_local=True)
    found = [own_gpus(cluster, node, visible)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)]
    assert found == (shares or ["GPU-a,GPU-b", "GPU-c,GPU-d"])
    assert own_gpus(replace(cluster, num_nodes=1), 0, visible) == {}

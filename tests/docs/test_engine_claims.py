"""What `paceline render --for list` claims of an engine is what its tests recorded."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.render import ENGINES

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "docs" / "engine-runs.jsonl"
ELSEWHERE = "tests/render/"
"""Tests that `./test` always runs, and so does not record."""

Line = Mapping[str, Any]

SHELLCHECK = "test_shellcheck_finds_nothing"
PROOF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "slurm": {
        "shellcheck": ("slurm_scripts::" + SHELLCHECK,),
        "job.sbatch, and the agents of a run, submitted to Slurm 22.05 of three nodes, one lost": (
            "slurm::test_the_rendered_script_trains_on_two_nodes",
            "slurm::test_a_lost_node_is_replaced_by_a_spare_node_with_the_same_bits",
        ),
    },
    "torchrun": {
        "shellcheck": ("torchrun::" + SHELLCHECK,),
        "run with torch 2.13 on 2 and 4 ranks over gloo, a rank killed, one node of two lost": (
            "torchrun::test_ddp_equals_a_single_device",
            "torchrun::test_hsdp_equals_a_single_device",
            "torchrun::test_a_killed_rank_is_started_again_and_the_losses_stay",
            "torchrun::test_a_job_of_two_nodes_goes_on_with_one",
        ),
    },
    "accelerate": {
        "its config loader, launch parser and FSDP plugin": (
            "accelerate::test_accelerate_reads_every_key_as_meant",
        ),
        "run with 1.15 on 2 and 4 ranks: DDP, FSDP2, DeepSpeed's ZeRO-1": (
            "accelerate::test_ddp_equals_a_single_device",
            "accelerate::test_fsdp2_equals_a_single_device_and_goes_on_from_its_checkpoint",
            "accelerate::test_hsdp_equals_a_single_device",
            "accelerate::test_the_deepspeed_plugin_equals_a_single_device",
        ),
    },
    "deepspeed": {
        "its DeepSpeedConfig, and its keys": (
            "deepspeed::test_deepspeed_reads_every_key_as_meant",
            "deepspeed::test_a_misspelled_key_at_the_top_is_found",
        ),
        "run with 0.19 on 2 ranks: ZeRO-1, 2, 3, offload to the CPU": (
            "deepspeed::test_zero1_equals_a_single_device_and_shares_its_moments",
            "deepspeed::test_zero2_equals_a_single_device_and_shares_its_moments",
            "deepspeed::test_zero3_equals_a_single_device_and_goes_on_from_its_checkpoint",
            "deepspeed::test_offloaded_optimizer_state_equals_a_single_device",
        ),
    },
    "megatron": {
        "megatron-core 0.16.1: its TransformerConfig and pipeline layout": (
            "megatron::test_megatron_core_takes_every_word_and_keeps_its_value",
        ),
        "flags against a list from its arguments.py": (ELSEWHERE + "test_megatron.py",),
        "not run: it needs GPUs": (),
    },
    "megatron-bridge": {
        "megatron-bridge 0.3.1: its config classes, with a stand-in for Transformer Engine": (
            "megatron::test_megatron_bridge_takes_every_word",
        ),
        "not run: it needs GPUs": (),
    },
    "torchtitan": {
        "torchtitan 0.3.0: its parser, its Trainer.Config, the model built on the meta device": (
            "torchtitan::test_torchtitan_builds_the_plans_model_and_mesh",
        ),
        "not run: it needs GPUs": (),
    },
    "network": {
        "shellcheck": ("network::" + SHELLCHECK,),
        "the sweep run with torch 2.13 on 2 ranks over gloo": (
            "network::test_the_sweep_runs_and_its_sums_are_right",
        ),
    },
    "mlx": {
        "MLX's own hostfile class and flags": ("mlx::test_mlx_reads_the_hostfile_and_every_flag",),
        "run with mlx[cpu] 0.32.4 on 2 and 4 ranks of the ring backend": (
            "mlx::test_ranks_that_average_gradients_equal_a_single_device",
            "mlx::test_fully_sharded_ranks_equal_a_single_device",
        ),
        "not run: on Macs, or over JACCL": (),
    },
    "tensorflow": {
        "TensorFlow's own resolver": ("tensorflow::test_tensorflow_reads_every_tf_config",),
        "run with tensorflow-cpu 2.21 on 2 workers": (
            "tensorflow::test_two_workers_equal_a_single_device_resume_and_export",
        ),
    },
    "ray": {
        "RayJob's CRD schema": ("ray::test_the_rayjob_keeps_to_kuberays_definition",),
        "run with Ray 2.60 on 2 workers over gloo, one killed": (
            "ray::test_fsdp2_under_ray_equals_a_single_device",
            "ray::test_a_killed_worker_is_replaced_and_the_end_is_torchruns",
        ),
        "a search with ASHA to its end": ("ray::test_a_search_finds_the_better_learning_rate",),
        "not run: on a KubeRay cluster": (),
    },
    "kubernetes": {
        "CRD schemas, every key": ("kubernetes::test_every_object_keeps_to_its_definition",),
        "kubernetes-validate 1.37": ("kubernetes::test_pods_and_configmap_are_kubernetes_own",),
        "not run: on a cluster": (),
    },
    "kfp": {
        "compiled by kfp 2.17": ("kfp::test_the_pipeline_compiles_to_four_steps_in_order",),
        "run here with 2 ranks in its training step": (
            "kfp::test_the_pipeline_trains_evaluates_and_exports",
        ),
    },
    "sky": {
        "sky.Task.from_yaml, offline (skypilot 0.14.1)": ("sky::test_skypilot_reads_every_task",),
        "not run: nothing is rented": (),
    },
    "modal": {
        "app.py imported by modal 1.6.4, offline": ("clouds::test_modal_reads_the_app",),
        "not run: nothing is rented": (),
    },
    "runpod": {
        "runpod 1.12's create_pod, offline": ("clouds::test_runpod_takes_the_pod",),
        "the pod's own command run here": (
            ELSEWHERE + "test_cloud_programs.py::test_runpods_files_fit_into_the_pod",
        ),
        "not run: nothing is rented": (),
    },
    "lambda": {
        "golden files": (ELSEWHERE + "golden/lambda",),
        "the program run here against a pretend API": (
            ELSEWHERE + "test_cloud_programs.py::test_lambdas_instance_is_terminated",
        ),
        "not run: nothing is rented": (),
    },
    "vertex": {
        "google-cloud-aiplatform 2.7's CustomJobSpec, strictly": (
            "clouds::test_vertex_reads_the_custom_job",
        ),
        "not run: nothing is rented": (),
    },
}
"""Engine -> each part of its claim -> the tests that show it: beginnings of their names."""


def recorded() -> list[Line]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()]


def wrong(
    name: str, claim: str, proof: Mapping[str, tuple[str, ...]], kept: list[Line]
) -> list[str]:
    """Every part of a claim that the record does not bear out."""
    parts = claim.split("; ")
    found = [f"no test is named for: {part}" for part in parts if part not in proof]
    found += [f"is not claimed any more: {part}" for part in proof if part not in parts]
    for part in parts:
        found += wrong_part(name, part, proof.get(part, ()), kept)
    return found


def wrong_part(name: str, part: str, tests: tuple[str, ...], kept: list[Line]) -> Iterator[str]:
    if part.startswith(("not run: it", "not run: nothing")):
        ran = [line["test"] for line in kept if line["engine"] == name and line["kind"] == "ran"]
        if ran:
            yield f"{part}, and yet there are {ran}"
    lines = []
    for test in tests:
        if test.startswith(ELSEWHERE):
            path, _, begins = test.partition("::")
            if not (ROOT / path).exists() or begins not in read(ROOT / path):
                yield f"{test} is not there"
            continue
        file, begins = test.split("::")
        wanted = f"tests/engines/test_{file}.py::{begins}"
        found = [line for line in kept if line["test"].startswith(wanted)]
        lines += found
        if not any(line["outcome"] == "passed" for line in found):
            yield f"{part}: {test} is not recorded"
    if re.match(r"(run|.* run)\b", part) and not part.startswith("not run"):
        yield from (f"{line['test']} ran nothing" for line in lines if line["kind"] != "ran")
    for version in re.findall(r"\d+\.\d+(?:\.\d+)?", part):
        seen = {each for line in lines for each in line["versions"].values()}
        if lines and not any(f"{each}.".startswith(f"{version}.") for each in seen):
            yield f"{part}: recorded with {sorted(seen)}"


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_claimed_of_an_engine_is_recorded(name):
    assert wrong(name, ENGINES[name].validated, PROOF[name], recorded()) == []


LINE = {"engine": "mlx", "kind": "ran", "outcome": "passed", "versions": {"mlx": "0.32.4"}}
RAN = [LINE | {"test": "tests/engines/test_mlx.py::test_two_ranks[a]"}]


@pytest.mark.parametrize(
    ("claim", "kept", "says"),
    [
        ("run with 0.32 on 2 ranks", RAN, []),
        ("run with 0.32 on 2 ranks", [], ["is not recorded"]),
        ("run with 0.32 on 2 ranks", [RAN[0] | {"kind": "validated"}], ["ran nothing"]),
        ("run with 0.3 on 2 ranks", RAN, ["recorded with"]),
        ("not run: it needs GPUs", RAN, ["and yet there are"]),
    ],
)
def test_a_claim_that_nothing_bears_out_is_found(claim, kept, says):
    tests = () if claim.startswith("not") else ("mlx::test_two_ranks",)
    found = wrong("mlx", claim, {claim: tests}, kept)
    assert len(found) == len(says)
    assert all(word in text for word, text in zip(says, found, strict=True))


def test_a_part_of_a_claim_without_a_test_is_found():
    assert wrong("mlx", "shellcheck", {}, RAN) == ["no test is named for: shellcheck"]

"""RunPod: one pod that fetches nothing, trains under the guard, and stops itself.

The program's files travel in an environment variable of the pod; they hold no secrets.
A stopped pod keeps its volume with the checkpoints, at the price of storage, until it is removed.
"""

from collections.abc import Iterator

from paceline.job import Job
from paceline.plan import Plan
from paceline.render import cloud, torchrun
from paceline.render.carried import OF_DDP
from paceline.render.cloud import GUARD, limits_of, named
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.shell import script
from paceline.render.text import header, to_json

GPUS = {
    "A100-80": "NVIDIA A100-SXM4-80GB",
    "A100-80-PCIe": "NVIDIA A100 80GB PCIe",
    "B200": "NVIDIA B200",
    "H100-SXM": "NVIDIA H100 80GB HBM3",
    "H100-NVL": "NVIDIA H100 NVL",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "H200": "NVIDIA H200",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "RTX-3090": "NVIDIA GeForce RTX 3090",
    "RTX-4090": "NVIDIA GeForce RTX 4090",
    "RTX-5090": "NVIDIA GeForce RTX 5090",
    "V100-16": "Tesla V100-SXM2-16GB",
    "V100-32": "Tesla V100-SXM2-32GB",
    "MI300X": "AMD Instinct MI300X OAM",
}
"""Our name -> RunPod's GPU id. Source: docs.runpod.io/references/gpu-types."""

IMAGE = "runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
"""RunPod's own, of its documentation; its torch is replaced by a newer one. Set
`cloud.image` to what your program needs."""

CARRIES = OF_DDP | {"cloud", "recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`pod.json`, what starts it, torchrun's files, the guard, and what is said of secrets."""
    return {
        "pod.json": to_json(_pod(plan, job)),
        "submit.sh": script(
            header(plan, job, *limits_of(plan, job, ("runpod",)).lines),
            'cd "$(dirname "$0")"',
            *cloud.need_lines("RUNPOD_API_KEY", *job.spec.cloud.secrets),
            'exec python3 runpod_submit.py "$@"',
        ),
        "launch.sh": torchrun.launch_script(plan, job),
        "start.sh": _start(plan, job),
        **cloud.secret_files(job, "RUNPOD_API_KEY"),
        **example(plan, job, "train_torchrun.py", "lm.py", GUARD, "runpod_submit.py"),
    }


def gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """torchrun's, several nodes, buckets, and spot."""
    yield from torchrun.gaps(plan, job)
    yield from cloud.data_gap(job)
    yield from cloud.region_gap(job, "runpod", "RunPod")
    yield from cloud.one_machine(plan, "runpod")
    if plan.cluster.accelerator == "MI300X" and job.spec.cloud.image is None:
        yield Gap(
            what=f"an image for {plan.cluster.accelerator}",
            why="the image that is taken without one is for NVIDIA's GPUs",
            nearest=None,
            fix="cloud.image: one with PyTorch for ROCm",
            where="cloud.image",
        )
    if job.spec.plan.spot:
        yield Gap(
            what="a spot pod",
            where="plan.spot",
            why="runpod's SDK (1.7 and newer) creates on-demand pods",
            nearest="an on-demand pod, at its price",
            fix="plan.spot: false, or render for sky",
        )
    if job.spec.cloud.storage is not None:
        yield Gap(
            what=f"checkpoints in {job.spec.cloud.storage}",
            where="cloud.storage",
            why="a pod mounts no bucket",
            nearest="they are on the pod's volume, which stays while the pod is stopped: start "
            "it, fetch them, and remove it",
        )


def _pod(plan: Plan, job: Job) -> dict[str, object]:
    """The arguments of `runpod.create_pod`, but secrets and the files."""
    asked = job.spec.cloud
    return {
        "name": job.spec.name,
        "image_name": asked.image or IMAGE,
        "gpu_type_id": named(plan, job, GPUS, provider="RunPod", counts=range(1, 9)),
        "gpu_count": plan.cluster.ranks_per_node,
        "cloud_type": "SECURE",
        "data_center_id": asked.region,
        "support_public_ip": False,
        "start_ssh": False,
        "container_disk_in_gb": 50,
        "volume_in_gb": 100,
        "volume_mount_path": "/workspace",
        "secrets": list(asked.secrets),
    }


def _start(plan: Plan, job: Job) -> str:
    limits = limits_of(plan, job, ("runpod",))
    return script(
        header(plan, job, "What the pod runs: whatever happens, it stops itself at the end."),
        'cd "$(dirname "$0")"',
        "trap 'runpodctl stop pod \"$RUNPOD_POD_ID\"' EXIT",
        *cloud.torch_lines(job, IMAGE),
        *job.spec.cloud.setup,
        limits.guarded("bash", "launch.sh"),
    )

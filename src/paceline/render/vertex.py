"""Vertex AI: a custom job whose worker pools are the plan's nodes.

The job's files lie in a bucket, which Vertex mounts at /gcs; checkpoints go there too.
"""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.plan import Plan
from paceline.render import cloud, torchrun
from paceline.render.carried import OF_DDP
from paceline.render.cloud import GUARD, Limits, limits_of, named
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.shell import command, quote, script
from paceline.render.text import header, to_yaml

GPUS = {
    "T4": "NVIDIA_TESLA_T4",
    "V100-16": "NVIDIA_TESLA_V100",
    "L4": "NVIDIA_L4",
    "A100-40": "NVIDIA_TESLA_A100",
    "A100-80": "NVIDIA_A100_80GB",
    "H100-SXM": "NVIDIA_H100_80GB",
    "H200": "NVIDIA_H200_141GB",
    "B200": "NVIDIA_B200",
}
"""Our name -> Vertex's AcceleratorType. Source: cloud.google.com, AI Platform v1 API."""

MACHINES = {
    "T4": {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32"},
    "V100-16": {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32", 8: "n1-standard-96"},
    "L4": {1: "g2-standard-12", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"},
    "A100-40": {1: "a2-highgpu-1g", 2: "a2-highgpu-2g", 4: "a2-highgpu-4g", 8: "a2-highgpu-8g"},
    "A100-80": {1: "a2-ultragpu-1g", 2: "a2-ultragpu-2g", 4: "a2-ultragpu-4g", 8: "a2-ultragpu-8g"},
    "H100-SXM": {1: "a3-highgpu-1g", 2: "a3-highgpu-2g", 4: "a3-highgpu-4g", 8: "a3-highgpu-8g"},
    "H200": {8: "a3-ultragpu-8g"},
    "B200": {8: "a4-highgpu-8g"},
}
"""GPUs in a machine -> its type. Source: cloud.google.com/compute/docs/gpus."""

IMAGE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
"""PyTorch's own; its torch is replaced by a newer one. Set `cloud.image` to what your
program needs."""

_WEEK_S = 7 * 86_400
"""Longest that Vertex lets a job run by default."""

_HEAD = "import json,os;c=json.loads(os.environ['CLUSTER_SPEC'])['cluster'];"

CARRIES = OF_DDP | {"cloud", "recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`job.yaml`, `submit.sh`, torchrun's files, the guard, and what is said of secrets."""
    limits = limits_of(plan, job, ("gcp",))
    return {
        "job.yaml": to_yaml(header(plan, job, *limits.lines), job_spec(plan, job, limits)),
        "submit.sh": _submit(plan, job),
        "launch.sh": torchrun.launch_script(plan, job),
        **cloud.secret_files(job, "GOOGLE_CLOUD_PROJECT"),
        **example(plan, job, "train_torchrun.py", "lm.py", GUARD),
    }


def gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """torchrun's, no bucket, and secrets."""
    asked = job.spec.cloud
    yield from torchrun.gaps(plan, job)
    yield from cloud.data_gap(job)
    yield from cloud.region_gap(job, "gcp", "Vertex AI")
    if asked.storage is None or not asked.storage.startswith("gs://"):
        yield Gap(
            what="where the job's files and checkpoints are",
            why="Vertex mounts buckets of Google Cloud Storage alone, and a custom job has no "
            "other place for either",
            nearest=None,
            fix="cloud.storage: gs://bucket/prefix",
            where="cloud.storage",
        )
    if asked.secrets:
        yield Gap(
            what=f"the secrets {', '.join(asked.secrets)}",
            where="cloud.secrets",
            why="a custom job has plain environment variables only, which anybody who may read "
            "the job may read",
            nearest="the program reads them from Secret Manager as the job's service account",
        )


def job_spec(plan: Plan, job: Job, limits: Limits) -> dict[str, Any]:
    """A CustomJobSpec in the words of its REST API, which `gcloud ai custom-jobs` takes.

    Raises:
        JobError: `H040`, Vertex has no such accelerator, or not so many in one machine.
    """
    cluster = plan.cluster
    counts = sorted(MACHINES.get(cluster.accelerator, {}))
    kind = named(plan, job, GPUS, provider="Vertex AI", counts=counts)
    worker = {
        "machineSpec": {
            "machineType": MACHINES[cluster.accelerator][cluster.ranks_per_node],
            "acceleratorType": kind,
            "acceleratorCount": cluster.ranks_per_node,
        },
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200},
        "containerSpec": {
            "imageUri": job.spec.cloud.image or IMAGE,
            "command": ["bash", "-c", _start(plan, job, limits)],
        },
    }
    pools = [worker | {"replicaCount": 1}]
    if cluster.num_nodes > 1:
        pools.append(worker | {"replicaCount": cluster.num_nodes - 1})
    scheduling: dict[str, Any] = {
        "timeout": f"{min(limits.max_run_s, _WEEK_S):.0f}s",
        "restartJobOnWorkerRestart": cluster.num_nodes > 1,
    }
    if job.spec.plan.spot:
        scheduling["strategy"] = "SPOT"
    return {"workerPoolSpecs": pools, "scheduling": scheduling}


def _start(plan: Plan, job: Job, limits: Limits) -> str:
    lines = ["set -euo pipefail", f"cd {quote(_mounted(job))}", *cloud.torch_lines(job, IMAGE)]
    lines += job.spec.cloud.setup
    if plan.cluster.num_nodes > 1:
        find = _HEAD + "print(c['workerpool0'][0].rpartition(':')[0])"
        lines += [
            f'HEAD_ADDRESS="$({command("python3", "-c", find)})"',
            'export HEAD_ADDRESS RUN_ID="$CLOUD_ML_JOB_ID"',
        ]
    return "\n".join([*lines, limits.guarded("bash", "launch.sh", spent="spent-seconds")])


def _bucket(job: Job) -> str:
    return f"{job.spec.cloud.storage or 'gs://'}/{job.spec.name}"


def _mounted(job: Job) -> str:
    return "/gcs/" + _bucket(job).removeprefix("gs://")


def _submit(plan: Plan, job: Job) -> str:
    region = job.spec.cloud.region or "us-central1"
    create = command(
        *("gcloud", "ai", "custom-jobs", "create"),
        *(f"--region={region}", f"--display-name={job.spec.name}", "--config=job.yaml"),
    )
    sync = command(
        "gcloud",
        "storage",
        "rsync",
        "--recursive",
        "--exclude=^\\.env|^checkpoints/|^spent-seconds",
    )
    return script(
        header(plan, job, "Copies this folder into the bucket and submits the job."),
        'cd "$(dirname "$0")"',
        *cloud.need_lines("GOOGLE_CLOUD_PROJECT"),
        f"{sync} . {quote(_bucket(job))}",
        f'exec {create} --project="$GOOGLE_CLOUD_PROJECT" "$@"',
    )

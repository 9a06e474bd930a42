"""Ray: a Ray Train program, a search of Ray Tune around it, and a RayJob for KubeRay."""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.job.kubernetes import KubernetesSpec
from paceline.job.non_defaults import fields_of
from paceline.plan import Plan
from paceline.render.carried import OF_DDP
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.pod import (
    PROGRAM,
    WORKSPACE,
    accelerator_resource,
    annotations,
    config_map,
    container_parts,
    image_of,
    pod_gaps,
    pod_parts,
    program_gaps,
    queued,
    resources,
    script_of,
)
from paceline.render.text import header, to_json, to_yaml

VERSION = "2.60.0"
"""Version of Ray, which the cluster's image must have."""

_SAMPLES = 12
"""Trials of a search; a guess."""

_RESIZE_S = 60.0
"""Between two looks whether a group that lost workers can grow again: Ray's own default."""

_KEPT_S = 600
"""How long KubeRay keeps a cluster whose job has ended, for its logs. A guess."""

CARRIES = (
    (OF_DDP | {"checkpoint.copy_to", "recovery.max_restarts", "recovery.shrink"})
    | {f"kubernetes.{name}" for name in fields_of(KubernetesSpec)}
) - {"kubernetes.runtime"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`train.py` and `tune_ray.py` with `ray.json`, and `rayjob.yaml` with its ConfigMap."""
    program = example(plan, job, "train_ray.py", "lm.py", "train_torchrun.py", "tune_ray.py")
    program["ray.json"] = to_json(options(plan, job))
    comment = header(plan, job, "kubectl apply -f rayjob.yaml, with KubeRay 1.7 in the cluster.")
    objects = to_yaml(comment, config_map(job, program), rayjob(plan, job))
    return program | {"rayjob.yaml": objects}


def options(plan: Plan, job: Job) -> dict[str, Any]:
    """What the programs read of Ray's own settings."""
    use_gpu = plan.cluster.backend == "nccl"
    least, most = _workers(plan, job)
    return {
        "name": job.spec.name,
        "num_workers": most if least == most else [least, most],
        "use_gpu": use_gpu,
        "resources_per_worker": {"GPU": 1} if use_gpu else {"CPU": 1},
        "placement_strategy": "PACK",
        "resize_every_s": _RESIZE_S,
        "max_failures": job.spec.recovery.max_restarts,
        "num_to_keep": job.spec.checkpoint.keep_last,
        "storage": job.spec.checkpoint.copy_to,
        "tune": {"samples": _SAMPLES},
    }


def rayjob(plan: Plan, job: Job) -> dict[str, Any]:
    """A RayJob: KubeRay starts a cluster, runs `train.py` on its head, and takes it down."""
    spec, nodes = job.spec.kubernetes, plan.cluster.num_nodes
    ranks = plan.cluster.ranks_per_node
    worker = {
        "groupName": "ranks",
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": {},
        "template": _pod(plan, job, "ray-worker", resources(plan, job, ranks)),
    }
    # The head runs the driver alone: no rank is to be placed there.
    head = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
        "template": _pod(plan, job, "ray-head", {}),
    }
    found: dict[str, Any] = {
        "entrypoint": f"python {script_of(job)}",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "backoffLimit": job.spec.recovery.max_restarts,
        "rayClusterSpec": {
            "rayVersion": VERSION,
            "headGroupSpec": head,
            "workerGroupSpecs": [worker],
        },
    }
    if spec.max_run is not None:
        found["activeDeadlineSeconds"] = int(spec.max_run)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": queued(job),
        "spec": found,
    }


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What the program, Ray or KubeRay cannot do as the plan has it."""
    # train.py gives its checkpoints to Ray's storage itself.
    of_program = [each for each in program_gaps(plan, job) if each.where != "checkpoint.copy_to"]
    return [*of_program, *_of_ray(plan, job), *pod_gaps(plan, job)]


def _of_ray(plan: Plan, job: Job) -> Iterator[Gap]:
    if job.spec.recovery.shrink and plan.layout.sharding == "hybrid":
        yield Gap(
            what="going on with fewer ranks",
            where="recovery.shrink",
            why=f"groups of {plan.layout.shard_degree} ranks must stay whole",
            nearest="a fixed number of workers: Ray waits for a node to come back",
            fix="layout.sharding: full",
        )
    if plan.cluster.num_nodes > 1 and not job.spec.checkpoint.copy_to:
        yield Gap(
            what="a storage that all nodes reach",
            where="checkpoint.copy_to",
            why="Ray Train puts every rank's part of a checkpoint into one place",
            nearest="train.py takes RAY_STORAGE, a URL or a folder that all nodes share",
            fix="checkpoint.copy_to: s3://bucket/prefix",
        )
    elif not job.spec.checkpoint.copy_to and job.spec.kubernetes.claim is None:
        yield Gap(
            what="a storage that the head and the workers of rayjob.yaml reach",
            where="checkpoint.copy_to",
            why="they are different pods, and Ray Train refuses a folder that they do not share",
            nearest="train.py on one machine; rayjob.yaml ends with Ray's message",
            fix="checkpoint.copy_to: s3://bucket/prefix, or kubernetes.claim",
        )


def _workers(plan: Plan, job: Job) -> tuple[int, int]:
    """Fewest and most workers. The fewest still hold the model: sharded state grows as they go."""
    ranks = plan.layout.num_ranks
    if not job.spec.recovery.shrink or plan.layout.sharding == "hybrid":
        return ranks, ranks
    if plan.layout.sharding == "none":
        return 1, ranks
    needed = plan.estimate.memory.total_bytes
    if needed is None or needed >= plan.limit_bytes:
        return ranks, ranks
    # As if all of it were sharded: never too few, and sometimes more than needed.
    return max(1, -(-ranks * needed // plan.limit_bytes)), ranks


def _pod(plan: Plan, job: Job, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    parts = container_parts(plan, job)
    # Every Python of the pod finds lm.py, and the driver puts its checkpoints on the claim.
    parts["env"] = [
        *parts["env"],
        {"name": "PYTHONPATH", "value": PROGRAM},
        {"name": "RAY_STORAGE", "value": job.spec.checkpoint.copy_to or f"{WORKSPACE}/ray"},
    ]
    container = {"name": name, "image": image_of(job), "workingDir": WORKSPACE, **parts}
    if asked:
        container["resources"] = asked
    template: dict[str, Any] = {"spec": {"containers": [container], **pod_parts(plan, job)}}
    if not asked and accelerator_resource(plan, job) is not None:
        template["spec"].pop("nodeSelector", None)  # the head needs no accelerator's node
    if annotations(job) and asked:
        template["metadata"] = {"annotations": annotations(job)}
    return template

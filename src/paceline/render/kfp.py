"""Kubeflow Pipelines v2: a pipeline that prepares, trains with torchrun, evaluates and exports."""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.job.non_defaults import settings_asked
from paceline.plan import Plan
from paceline.render import torchrun
from paceline.render.carried import OF_DDP
from paceline.render.engine import Files, Gap
from paceline.render.example import example, without_own_program
from paceline.render.pod import accelerator_resource, image_of, name_of, pod_gaps
from paceline.render.text import to_json

_PIPELINE = "pipeline.py"

CARRIES = OF_DDP | {"kubernetes.image", "kubernetes.accelerator_resource", "recovery.max_restarts"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`pipeline.py`, which compiles itself or runs here, `kfp.json`, and the program it carries."""
    program = example(plan, job, "train_torchrun.py", "lm.py")
    pipeline = example(plan, job, "pipeline_kfp.py")["train.py"]
    options = to_json(_options(plan, job, sorted(program)))
    return program | {_PIPELINE: pipeline, "kfp.json": options}


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What one pod of a pipeline cannot do."""
    of_pods = [each for each in pod_gaps(plan, job) if "outlive a pod" not in each.what]
    return [*without_own_program(torchrun.gaps(plan, job)), *_of_pipeline(plan, job), *of_pods]


def _options(plan: Plan, job: Job, program: list[str]) -> dict[str, Any]:
    return {
        "name": name_of(job),
        "description": f"{plan.layout_name} on {plan.cluster.name}",
        "image": image_of(job),
        "processes": plan.cluster.ranks_per_node,
        "accelerator": accelerator_resource(plan, job),
        "retries": job.spec.recovery.max_restarts,
        "program": program,
    }


def _of_pipeline(plan: Plan, job: Job) -> Iterator[Gap]:
    if plan.cluster.num_nodes > 1:
        yield Gap(
            what=f"{plan.cluster.num_nodes} nodes",
            where="cluster.nodes",
            why="a step of a pipeline is one pod",
            nearest=None,
            fix="cluster.nodes: 1, or `paceline render --for kubernetes`, whose TrainJob a "
            "pipeline can create",
        )
    if job.spec.kubernetes.script is not None:
        yield Gap(
            what=f"the program {job.spec.kubernetes.script}",
            where="kubernetes.script",
            why="the steps evaluate and export the checkpoints of the example program",
            nearest="the example program",
            fix="write the steps of your own program into pipeline.py",
        )
    for key in settings_asked(job.spec):
        if not key.startswith("kubernetes.") or key in CARRIES or key == "kubernetes.script":
            continue
        yield Gap(
            what=key,
            where=key,
            why="pipeline.py needs kfp alone; the package kfp-kubernetes says such of a task",
            nearest="pods without it; artifacts go to the pipeline's own storage",
            fix="kubernetes.use_secret_as_env(task, ...) and the like in pipeline.py",
        )

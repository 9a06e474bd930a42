"""Kubernetes: a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime, and a PyTorchJob of the
older training operator. Both start torchrun in one pod for each node.
"""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.plan import Plan
from paceline.render import kubernetes_mlx
from paceline.render.carried import OF_DDP
from paceline.render.engine import Files, Gap
from paceline.render.environment import PORT
from paceline.render.example import example
from paceline.render.pod import (
    PROGRAM,
    WORKSPACE,
    annotations,
    config_map,
    container_parts,
    image_of,
    metadata,
    name_of,
    pod_gaps,
    pod_parts,
    program_gaps,
    queued,
    resources,
    script_of,
    variables,
)
from paceline.render.shell import quote, script
from paceline.render.text import header, to_yaml

_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""Label by which Trainer v2 finds the job of a runtime that trains. Source: its own runtimes,
kubeflow/trainer manifests/base/runtimes/torch_distributed.yaml, v2.3."""

_NODE = "node"
"""Name of that job and of its container, which Trainer v2 looks for. Source: the same."""

START = "start.sh"
"""In the ConfigMap: starts another engine's `launch.sh`."""

_ENGINE = "/tmp/engine"
"""Where a pod has that engine's files: `launch.sh` writes beside itself."""

_MANAGER = "paceline.dev/render"
"""Who patched a runtime; Trainer v2 wants a name with a domain."""

CARRIES = OF_DDP | {"kubernetes", "recovery.max_restarts"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`program.yaml`, `trainjob.yaml` with its runtime, `pytorchjob.yaml`, and the program; for
    Kubeflow's runtime of MLX what it starts."""
    if kubernetes_mlx.starts(job):
        return kubernetes_mlx.render(plan, job)
    program = example(plan, job, "train_torchrun.py", "lm.py")
    comment = header(plan, job)
    files = {
        "program.yaml": to_yaml(
            [*comment, "kubectl apply -f this first."], config_map(job, program)
        ),
        "pytorchjob.yaml": to_yaml(
            [*comment, "Kubeflow training operator 1.9, where there is no Trainer v2."],
            pytorchjob(plan, job),
        ),
    }
    train = [trainjob(plan, job)]
    if job.spec.kubernetes.runtime is None:
        train.insert(0, training_runtime(plan, job))
    files["trainjob.yaml"] = to_yaml([*comment, "Kubeflow Trainer 2.3."], *train)
    return program | files


def starts_engine(job: Job) -> bool:
    """Whether the runtime that the job names starts an engine's own program."""
    return kubernetes_mlx.starts(job)


def objects(
    plan: Plan, job: Job, engine_files: Files | None = None, *, run: str = ""
) -> list[dict[str, Any]]:
    """What `paceline run --on kubernetes` creates, in this order: of `kubernetes.api` alone.

    Args:
        plan: Its nodes and ranks.
        job: Its section `kubernetes`.
        engine_files: Another engine's, whose `launch.sh` every pod starts; None is the example
            program under torchrun.
        run: Name of another engine's run, whose checkpoints are apart from those of other runs.
    """
    files = example(plan, job, "train_torchrun.py", "lm.py") if engine_files is None else None
    if engine_files is not None:
        files = {**engine_files, START: start_script(job, run)}
    assert files is not None
    is_engine = engine_files is not None
    found = [config_map(job, files)]
    if job.spec.kubernetes.api == "pytorchjob":
        return [*found, pytorchjob(plan, job, is_engine=is_engine)]
    if job.spec.kubernetes.runtime is None:
        found.append(training_runtime(plan, job))
    return [*found, trainjob(plan, job, is_engine=is_engine)]


def start_script(job: Job, run: str) -> str:
    """What a pod does to start another engine's `launch.sh`: the ConfigMap is read-only, and
    checkpoints belong to the claim, in a folder of the run: an engine resumes from what it finds.

    Both operators set the PET_ variables. Sources: kubeflow/trainer v2.3
    pkg/runtime/framework/plugins/torch/torch.go, training-operator v1.9
    pkg/controller.v1/pytorch/envvar.go.
    """
    kept = [
        (quote(f"{WORKSPACE}/{run}/{folder}"), f"{_ENGINE}/{folder}")
        for folder in ("checkpoints", "checkpoint")
    ]
    links = [f"mkdir -p {there} && ln -sfn {there} {here}" for there, here in kept]
    own = job.spec.kubernetes.script
    return script(
        ["Every pod starts it once: it meets the other pods as the operator says."],
        f"mkdir -p {_ENGINE} && cp {PROGRAM}/* {_ENGINE}/",
        *links,
        'export NODE_RANK="${PET_NODE_RANK:-0}"',
        'export HEAD_ADDRESS="${PET_MASTER_ADDR:-127.0.0.1}" HEAD_PORT="${PET_MASTER_PORT:-29500}"',
        f"export RUN_ID={quote(run)}",
        "is_host=false",
        'if [ "$NODE_RANK" -eq 0 ]; then is_host=true; fi',
        'export PET_RDZV_CONF="is_host=$is_host" PET_LOCAL_ADDR="$POD_IP"',
        *([f"export TRAIN_SCRIPT={quote(own)}"] if own is not None else []),
        f"exec bash {_ENGINE}/launch.sh",
    )


def training_runtime(plan: Plan, job: Job) -> dict[str, Any]:
    """How a pod of the job looks, for Trainer v2."""
    container = {"name": _NODE, "image": image_of(job), "workingDir": WORKSPACE}
    pod: dict[str, Any] = {"containers": [container | container_parts(plan, job)]}
    pod |= pod_parts(plan, job)
    replicated = {"name": _NODE, "template": {"metadata": {"labels": _STEP}}}
    replicated["template"]["spec"] = {"template": _template(job, pod)}  # type: ignore[index]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(
            job, f"{name_of(job)}-runtime", **{"trainer.kubeflow.org/framework": "torch"}
        ),
        "spec": {
            "mlPolicy": {"numNodes": plan.cluster.num_nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.spec.recovery.max_restarts},
                    "replicatedJobs": [replicated],
                }
            },
        },
    }


def trainjob(plan: Plan, job: Job, *, is_engine: bool = False) -> dict[str, Any]:
    """The job for Trainer v2. Processes of a node are said here: in 2.3 the runtime has no place
    for them."""
    spec, ranks = job.spec.kubernetes, plan.cluster.ranks_per_node
    trainer: dict[str, Any] = {
        "image": image_of(job),
        "command": _command(job, is_engine),
        "numNodes": plan.cluster.num_nodes,
        "numProcPerNode": ranks,
        "resourcesPerNode": resources(plan, job, ranks),
    }
    found: dict[str, Any] = {"runtimeRef": _runtime(job), "trainer": trainer}
    if spec.runtime is not None:
        trainer["env"] = variables(plan, job)
        # A patch has no working folder, and the image's own is not where checkpoints are kept.
        if not is_engine:
            trainer["command"] = ["sh", "-c", f"cd {WORKSPACE} && exec torchrun {script_of(job)}"]
        found["runtimePatches"] = [_patch(plan, job)]
    if spec.max_run is not None:
        found["activeDeadlineSeconds"] = int(spec.max_run)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": queued(job),
        "spec": found,
    }


def pytorchjob(plan: Plan, job: Job, *, is_engine: bool = False) -> dict[str, Any]:
    """The job for the older operator, which gives torchrun its PET_ variables."""
    spec, nodes = job.spec.kubernetes, plan.cluster.num_nodes
    container = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": image_of(job),
        "command": _command(job, is_engine),
        "workingDir": WORKSPACE,
        "resources": resources(plan, job, plan.cluster.ranks_per_node),
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
    }
    pod = {"containers": [container | container_parts(plan, job)], **pod_parts(plan, job)}

    def replicas(count: int) -> dict[str, Any]:
        template = _template(job, pod)
        return {"replicas": count, "restartPolicy": "OnFailure", "template": template}

    replica_specs = {"Master": replicas(1)}
    if nodes > 1:
        replica_specs["Worker"] = replicas(nodes - 1)
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",
        "backoffLimit": job.spec.recovery.max_restarts,
    }
    if spec.max_run is not None:
        policy["activeDeadlineSeconds"] = int(spec.max_run)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": queued(job),
        "spec": {
            "nprocPerNode": str(plan.cluster.ranks_per_node),
            "runPolicy": policy,
            "pytorchReplicaSpecs": replica_specs,
        },
    }


def _command(job: Job, is_engine: bool) -> list[str]:
    return ["bash", f"{PROGRAM}/{START}"] if is_engine else ["torchrun", script_of(job)]


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What torchrun's example program lacks, what pods lack, and what the objects lack."""
    own = [*_of_objects(plan, job)]
    if kubernetes_mlx.starts(job):
        return [*kubernetes_mlx.gaps(plan, job), *own]
    return [*program_gaps(plan, job), *pod_gaps(plan, job), *own]


def _of_objects(plan: Plan, job: Job) -> Iterator[Gap]:
    if job.spec.recovery.shrink and plan.cluster.num_nodes > 1:
        yield Gap(
            what="going on with fewer nodes",
            where="recovery.shrink",
            why="a TrainJob's numNodes is fixed in Trainer 2.3",
            nearest="all pods start again, from the newest checkpoint, when one is lost",
            fix="`paceline render --for ray`, whose workers are elastic",
        )


def _template(job: Job, pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"spec": pod}
    if annotations(job):
        found["metadata"] = {"annotations": annotations(job)}
    return found


def _runtime(job: Job) -> dict[str, str]:
    named = job.spec.kubernetes.runtime
    group = {"apiGroup": "trainer.kubeflow.org"}
    if named is not None:
        return group | {"kind": "ClusterTrainingRuntime", "name": named}
    return group | {"kind": "TrainingRuntime", "name": f"{name_of(job)}-runtime"}


def _patch(plan: Plan, job: Job) -> dict[str, Any]:
    """What a runtime of the cluster's lacks: volumes, where pods may be, and what they may do."""
    parts = container_parts(plan, job)
    parts.pop("env")  # of the trainer itself
    template = _template(job, {"containers": [{"name": _NODE, **parts}], **pod_parts(plan, job)})
    inner = {"name": _NODE, "template": {"spec": {"template": template}}}
    return {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [inner]}}},
    }

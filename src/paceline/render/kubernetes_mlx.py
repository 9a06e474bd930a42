"""Kubeflow Trainer's `mlx-distributed` runtime: MLX on NVIDIA GPUs, started by mpirun, over NCCL.

The cluster has the runtime; what is written is its program and a TrainJob. mpirun starts the ranks,
and each becomes a rank of MLX's NCCL backend. Leaves out: that any of it ran, which needs GPUs.
Sources: kubeflow/trainer manifests/base/runtimes/mlx_distributed.yaml and
pkg/runtime/framework/plugins/mpi/mpi.go; mlx 0.32 _distributed_utils/launch.py, launch_nccl.
"""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.plan import Plan
from paceline.render.engine import Files, Gap
from paceline.render.example import example, example_gaps, without_own_program
from paceline.render.mlx import layout_gaps
from paceline.render.pod import (
    PROGRAM,
    WORKSPACE,
    annotations,
    config_map,
    container_parts,
    pod_gaps,
    pod_parts,
    queued,
    resources,
    script_of,
    variables,
)
from paceline.render.shell import quote, script
from paceline.render.text import header, to_yaml

RUNTIME = "mlx-distributed"
"""Name of the ClusterTrainingRuntime."""

_IMAGE = "ghcr.io/kubeflow/trainer/mlx-runtime"
"""Its image, with mlx[cuda] 0.30.6 (cmd/runtimes/mlx/requirements.txt)."""

_HOSTS = "/etc/mpi/hostfile"
"""Where the launcher has the pods' names, those of rank 0 first."""

_PORT = 12345
"""mlx.launch's own default of `--nccl-port`."""

_MANAGER = "paceline.dev/render"


def starts(job: Job) -> bool:
    """Whether the job asks for this runtime."""
    return job.spec.kubernetes.runtime == RUNTIME


def render(plan: Plan, job: Job) -> Files:
    """`program.yaml`, `trainjob.yaml`, and the program with what starts it."""
    program = {
        **example(plan, job, "train_mlx.py"),
        "start.sh": _start(plan, job),
        "rank.sh": _rank(plan, job),
    }
    comment = header(plan, job)
    files = {
        "program.yaml": to_yaml(
            [*comment, "kubectl apply -f this first."], config_map(job, program)
        ),
        "trainjob.yaml": to_yaml([*comment, "Kubeflow Trainer 2.3."], trainjob(plan, job)),
    }
    return program | files


def _start(plan: Plan, job: Job) -> str:
    names = [each["name"] for each in _variables(plan, job)]
    return script(
        header(plan, job, "The launcher's: mpirun starts all ranks, on the pods of the hostfile."),
        f"head=\"$(head -n 1 {_HOSTS} | cut -d ' ' -f 1)\"",
        "# MLX's NCCL backend wants rank 0's address, and a hostfile has names.",
        'NCCL_HOST_IP="$(getent hosts "$head" | awk \'{print $1; exit}\')"',
        ': "${NCCL_HOST_IP:?rank 0 has no address yet: $head}"',
        f'export NCCL_HOST_IP NCCL_PORT="${{NCCL_PORT:-{_PORT}}}"',
        f"exec mpirun --hostfile {_HOSTS} -np {plan.cluster.num_ranks} --map-by slot \\",
        "  " + " ".join(f"-x {name}" for name in ("NCCL_HOST_IP", "NCCL_PORT", *names)) + " \\",
        f'  bash {PROGRAM}/rank.sh "$@"',
    )


def _variables(plan: Plan, job: Job) -> list[dict[str, Any]]:
    """What the launcher sets and hands on to all ranks: nothing of PyTorch, nothing of one pod."""
    found = variables(plan, job)
    return [each for each in found if not each["name"].startswith(("TORCH_", "POD_"))]


def _rank(plan: Plan, job: Job) -> str:
    return script(
        header(plan, job, "One rank, started by mpirun: a rank of MLX over NCCL, with its GPU."),
        'export MLX_RANK="$OMPI_COMM_WORLD_RANK" MLX_WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"',
        'export CUDA_VISIBLE_DEVICES="$OMPI_COMM_WORLD_LOCAL_RANK"',
        "# By these the program, and MLX, would take the MPI backend.",
        "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
        f"cd {WORKSPACE}",
        f'exec python3 {quote(script_of(job))} "$@"',
    )


def trainjob(plan: Plan, job: Job) -> dict[str, Any]:
    """The job. Of `numNodes` pods one is the launcher, which trains as well; both kinds of pods are
    patched, since the ranks of both read the program."""
    ranks = plan.cluster.ranks_per_node
    parts = container_parts(plan, job)
    parts.pop("env")  # of the launcher itself; mpirun hands them on
    patched = []
    for name in ("node", "launcher"):
        template: dict[str, Any] = {
            "spec": {"containers": [{"name": "node", **parts}], **pod_parts(plan, job)}
        }
        if annotations(job):
            template["metadata"] = {"annotations": annotations(job)}
        patched.append({"name": name, "template": {"spec": {"template": template}}})
    found: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": RUNTIME,
        },
        "trainer": {
            "image": job.spec.kubernetes.image or _IMAGE,
            "command": ["bash", f"{PROGRAM}/start.sh"],
            "numNodes": plan.cluster.num_nodes,
            "numProcPerNode": ranks,
            "resourcesPerNode": resources(plan, job, ranks),
            "env": _variables(plan, job),
        },
        "runtimePatches": [
            {
                "manager": _MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": patched}}},
            }
        ],
    }
    if job.spec.kubernetes.max_run is not None:
        found["activeDeadlineSeconds"] = int(job.spec.kubernetes.max_run)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": queued(job),
        "spec": found,
    }


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What MLX on CUDA and its runtime lack, and that nobody here ran them."""
    program = [*layout_gaps(plan), *example_gaps(plan, job, "own")]
    if job.spec.kubernetes.script is None:
        program = without_own_program(program, "kubernetes.script: your program in the image")
    pods = [each for each in pod_gaps(plan, job) if each.where != "kubernetes.image"]
    return [*_of_runtime(plan, job), *program, *pods]


def _of_runtime(plan: Plan, job: Job) -> Iterator[Gap]:
    if plan.engine != "mlx" or plan.cluster.backend != "nccl":
        yield Gap(
            what=f"{plan.engine} on {plan.cluster.accelerator} in the runtime {RUNTIME}",
            where="kubernetes.runtime",
            why="it starts MLX on NVIDIA GPUs with mpirun, and has no PyTorch",
            nearest=None,
            fix="engine: mlx with an NVIDIA accelerator, or another kubernetes.runtime",
        )
        return
    if plan.cluster.num_nodes == 1:
        yield Gap(
            what=f"one pod of {plan.cluster.ranks_per_node} GPUs",
            where="cluster.nodes",
            why="Trainer 2.3 makes a pod beside the launcher at least, which is one more of them",
            nearest=f"two pods; mpirun's {plan.cluster.num_ranks} ranks fill the first alone",
            fix="cluster.nodes: 2 or more",
        )
    yield Gap(
        what="a trial of MLX on CUDA",
        where="kubernetes.runtime",
        why=f"{RUNTIME} was run on no GPU here, and the catalog has no rates of MLX on CUDA: the "
        "plan's seconds are estimates for PyTorch's kernels",
        nearest="files after Kubeflow's manifest, checked against Trainer's schema alone",
        fix=f"kubernetes.image with mlx[cuda] 0.32, which the program is for: {_IMAGE} has 0.30.6",
    )

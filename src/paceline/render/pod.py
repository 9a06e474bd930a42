"""The pod of one node's ranks: image, resources, /dev/shm, RDMA, volumes, secrets by their name.

The same for every kind of object that starts pods. The program comes in a ConfigMap at `/job`; it
runs in `/workspace`, which is the claim for checkpoints or the pod's own disk.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.catalog.mig import split_slice
from paceline.job import Job
from paceline.job.sources import absolute_paths
from paceline.plan import Plan
from paceline.render import torchrun
from paceline.render.engine import Files, Gap
from paceline.render.environment import environment
from paceline.render.example import folder_gaps, without_own_program
from paceline.render.fabric import over_tcp

PROGRAM, WORKSPACE = "/job", "/workspace"
PLACEHOLDER = "SET-kubernetes.image-IN-THE-JOB-FILE"
"""No valid image name, since it has capitals: Kubernetes refuses it (InvalidImageName)."""

_NAME_LIMIT = 40
"""Most characters of a job's name: what the controllers append for pods, services and hosts then
fits in 63."""

_RESOURCES = {"nccl": "nvidia.com/gpu", "xla": "google.com/tpu", "neuron": "aws.amazon.com/neuron"}
"""Library of the collectives -> what the device plugin counts. Source: the plugins' own pages."""

_SHM_A_RANK = 2**30
"""Bytes of /dev/shm for each rank: a guess. NCCL takes some ten MiB, data loaders what is asked."""


def name_of(job: Job) -> str:
    """The job's name as a label of RFC 1035, which every kind of object takes.

    Lower case, `.` and `_` become `-`, it begins with a letter, and is cut to 40 characters.
    """
    text = re.sub(r"[^a-z0-9]+", "-", job.spec.name.lower()).strip("-")
    if not text or not text[0].isalpha():
        text = f"job-{text}".rstrip("-")
    return text[:_NAME_LIMIT].rstrip("-")


def metadata(job: Job, name: str, **labels: str) -> dict[str, Any]:
    """Name, namespace and labels of an object."""
    known = {"app.kubernetes.io/name": name_of(job), "app.kubernetes.io/managed-by": "paceline"}
    return {
        "name": name,
        "namespace": job.spec.kubernetes.namespace,
        "labels": known | labels,
    }


def queued(job: Job) -> dict[str, Any]:
    """Metadata of an object that starts pods: Kueue admits all of them or none."""
    queue = job.spec.kubernetes.queue
    labels = {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}
    return metadata(job, name_of(job), **labels)


def config_map(job: Job, files: Files) -> dict[str, Any]:
    """The program as an object, which the pods mount."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, f"{name_of(job)}-program"),
        "data": dict(files),
    }


def resources(plan: Plan, job: Job, ranks: int) -> dict[str, Any]:
    """What `ranks` ranks ask for: accelerators and RDMA devices; CPU cores where there are none."""
    spec = job.spec.kubernetes
    limits: dict[str, Any] = {}
    counted = accelerator_resource(plan, job)
    if counted is not None:
        limits[counted] = ranks
    if spec.rdma_resource is not None:
        limits[spec.rdma_resource] = spec.rdma_devices
    found: dict[str, Any] = {"limits": limits} if limits else {}
    if counted is None:
        found["requests"] = {"cpu": ranks}
    return found


def accelerator_resource(plan: Plan, job: Job) -> str | None:
    """How the cluster counts the plan's accelerators; None on CPUs."""
    asked = job.spec.kubernetes.accelerator_resource
    if asked == "none" or plan.cluster.backend == "gloo":
        return None
    if asked != "auto":
        return asked
    if plan.cluster.accelerator.startswith("MI"):
        return "amd.com/gpu"
    if (profile := split_slice(plan.cluster.accelerator)[1]) is not None:
        return f"nvidia.com/mig-{profile}"
    return _RESOURCES.get(plan.cluster.backend)


def container_parts(plan: Plan, job: Job) -> dict[str, Any]:
    """What a container has beside its name, image, command and resources."""
    parts: dict[str, Any] = {"env": variables(plan, job), "volumeMounts": _mounts()}
    if job.spec.kubernetes.rdma_resource is not None:
        # Memory that an RDMA device reads is pinned, which needs this capability.
        parts["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return parts


def pod_parts(plan: Plan, job: Job) -> dict[str, Any]:
    """What a pod has beside its containers."""
    spec = job.spec.kubernetes
    parts: dict[str, Any] = {"volumes": _volumes(plan, job)}
    if spec.node_selector:
        parts["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        parts["tolerations"] = [{"key": key, "operator": "Exists"} for key in spec.tolerations]
    if spec.service_account is not None:
        parts["serviceAccountName"] = spec.service_account
    return parts


def annotations(job: Job) -> dict[str, str]:
    """Annotations of a pod: the SR-IOV network that Multus attaches it to."""
    network = job.spec.kubernetes.network
    return {} if network is None else {"k8s.v1.cni.cncf.io/networks": network}


def variables(plan: Plan, job: Job) -> list[dict[str, Any]]:
    """The ranks' environment; secrets by their name and key alone."""
    # Pods have an address of their own, so nothing of one machine's loopback is set.
    plain = [each for each in environment(plan) if each.value != "lo"]
    found: list[dict[str, Any]] = [{"name": each.name, "value": each.value} for each in plain]
    if job.spec.engine != "paceline":  # its launcher tells the other pods where this one is
        found.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    for name, place in job.spec.kubernetes.secrets.items():
        secret, key = place.split("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def image_of(job: Job) -> str:
    """The container's image, or a placeholder that no cluster takes."""
    return job.spec.kubernetes.image or PLACEHOLDER


def _paths_of(job: Job) -> list[str]:
    """Absolute paths that another engine's program reads."""
    spec = job.spec
    if spec.engine == "paceline":
        return []
    own = [path for path in [spec.engine_path] if path is not None and path.startswith("/")]
    return sorted({*own, *absolute_paths(job)})


def pod_gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """What pods do not get as the plan or the job has it."""
    spec, name = job.spec.kubernetes, job.spec.name
    if spec.script is None:
        yield from folder_gaps(job)
    if name_of(job) != name:
        yield Gap(
            what=f"the name {name}",
            where="name",
            why=f"names in Kubernetes are a-z, 0-9 and -, {_NAME_LIMIT} characters with room for "
            "what the controllers append (RFC 1035)",
            nearest=name_of(job),
            fix=f"name: {name_of(job)}",
        )
    if spec.image is None:
        yield Gap(
            what="the container image",
            where="kubernetes.image",
            why="the job names none, and there is none that has your program's packages for sure",
            nearest=f"{PLACEHOLDER}, which Kubernetes refuses",
            fix="kubernetes.image: your registry's image with Python and PyTorch",
        )
    if plan.cluster.backend != "gloo" and not (
        accelerator_resource(plan, job) or spec.accelerator_resource == "none"
    ):
        yield Gap(
            what=f"{plan.cluster.ranks_per_node} {plan.cluster.accelerator} for each pod",
            why="it is not known how your cluster counts them",
            nearest=None,
            where="kubernetes.accelerator_resource",
            fix="kubernetes.accelerator_resource: as `kubectl describe node` shows it",
        )
    if plan.cluster.uses_rdma and plan.cluster.num_nodes > 1 and spec.rdma_resource is None:
        yield Gap(
            what="RDMA between nodes",
            where="kubernetes.rdma_resource",
            why="a pod has an RDMA device only where it asks for one, and each cluster counts them "
            "by a name of its own",
            nearest=f"NCCL over TCP on the pods' network{over_tcp(plan)}",
            fix="kubernetes.rdma_resource, and kubernetes.network where it is SR-IOV",
        )
    absent = [path for path in _paths_of(job) if not Path(path).is_relative_to(WORKSPACE)]
    if absent:
        yield Gap(
            what=f"{', '.join(absent)} in the pods",
            where="kubernetes.claim",
            why=f"of your storage a pod has {WORKSPACE} alone, where kubernetes.claim is mounted",
            nearest="what the image has there; launch.sh ends where it has nothing",
            fix=f"paths below {WORKSPACE}, on the claim, or the files in the image",
        )
    if spec.claim is None:
        yield Gap(
            what="checkpoints that outlive a pod",
            where="kubernetes.claim",
            why="the job names no PersistentVolumeClaim",
            nearest=f"{WORKSPACE} on the pod's own disk: a pod that is replaced starts from step 0",
            fix="kubernetes.claim: a claim that all nodes may write (ReadWriteMany)",
        )
    paths = job.spec.data.path
    relative = [
        each for each in ([paths] if isinstance(paths, str) else paths or []) if each[0] != "/"
    ]
    if relative:
        yield Gap(
            what=f"data.path {', '.join(relative)}",
            where="data.path",
            why="files beside the job file are not in the pod",
            nearest=f"the same path below {PROGRAM}, which has the program alone",
            fix=f"data.path: where image or claim have them, such as {WORKSPACE}/corpus/*.txt",
        )


def script_of(job: Job) -> str:
    """What every rank runs: the image's own program, or the example program."""
    return job.spec.kubernetes.script or f"{PROGRAM}/train.py"


def program_gaps(plan: Plan, job: Job) -> list[Gap]:
    """What the example program lacks: refused, unless the image has a program of its own."""
    gaps = torchrun.gaps(plan, job)
    found = without_own_program(gaps, "kubernetes.script: your program in the image")
    if job.spec.kubernetes.script is None:
        return found
    return [gap for gap, there in zip(gaps, found, strict=True) if gap == there]


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "program", "mountPath": PROGRAM},
        {"name": "workspace", "mountPath": WORKSPACE},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _volumes(plan: Plan, job: Job) -> list[dict[str, Any]]:
    spec = job.spec.kubernetes
    claim: dict[str, Any] = {"persistentVolumeClaim": {"claimName": spec.claim}}
    if spec.claim is None:
        claim = {"emptyDir": {}}
    shm = _SHM_A_RANK * plan.cluster.ranks_per_node if spec.shm == "auto" else spec.shm
    return [
        {"name": "program", "configMap": {"name": f"{name_of(job)}-program"}},
        {"name": "workspace", **claim},
        # Memory of the node, counted as the pod's: without it /dev/shm has 64 MiB.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _quantity(shm)}},
    ]


def _quantity(number_bytes: int) -> str:
    """Bytes as Kubernetes writes them.

    >>> _quantity(2**31), _quantity(1000)
    ('2Gi', '1000')
    """
    whole, rest = divmod(number_bytes, 2**30)
    return str(number_bytes) if rest else f"{whole}Gi"

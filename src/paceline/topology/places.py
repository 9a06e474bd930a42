"""What a job's sections for places (ssh, Slurm, clouds, Kubernetes) mean for its cluster: pods
without an RDMA device talk over TCP, whatever the NICs of their nodes can do.
"""

from dataclasses import replace
from typing import Any

from paceline.job import Job, KubernetesSpec

_PODS = ("kubernetes", "ray")
"""Places whose ranks may be pods: Ray's nodes are KubeRay's where the job says how pods look."""

_OTHERS = ("ssh", "slurm", "cloud")


def at_place(job: Job, place: str) -> Job:
    """The job as it is planned for one place (or engine that writes for one): of a job with
    sections for several, those of pods count on pods alone, and alone there."""
    if place in _PODS:
        dropped: tuple[str, ...] = _OTHERS
    elif place in ("ssh", "slurm", "srun", "sky"):
        dropped = ("kubernetes",)
    else:
        return job
    emptied: dict[str, Any] = {name: type(getattr(job.spec, name))() for name in dropped}
    return replace(job, spec=replace(job.spec, **emptied))


def lacks_rdma(job: Job) -> bool:
    """Whether the job's nodes are pods that ask for no RDMA device."""
    return pods_lack_rdma(job) and not has_other_place(job)


def pods_lack_rdma(job: Job) -> bool:
    """Whether the job's pods, if it runs as pods, ask for no RDMA device."""
    pods, asks = job.spec.kubernetes, job.spec.cluster.rdma is True
    return pods != KubernetesSpec() and pods.rdma_resource is None and not asks


def has_other_place(job: Job) -> bool:
    """Whether the job has a section of a place that is no pods'."""
    sections = (getattr(job.spec, name) for name in _OTHERS)
    return any(section != type(section)() for section in sections)

"""Places of one manifest that have to say the same: GPUs, processes of a pod, versions of Ray."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.kubernetes import ClusterJob
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, WARNING, found

_RAY_IMAGE = re.compile(r"(?:^|/)ray(?:-ml|-llm)?:(\d+\.\d+\.\d+)(?=$|[-.@])")
"""`rayproject/ray:2.50.0-gpu`: the tags that Ray's own images and copies of them have."""


def check_gpu_requests(job: ClusterJob) -> Iterator[Finding]:
    """Requests of GPUs that are no limits: the API server refuses the pod.

    Source: `validateResourceRequirements` of kubernetes pkg/apis/core/validation.
    """
    for pods in job.pods:
        for name, asked, limit in pods.gpu_requests():
            number, most = asked.number(), limit.number() if limit is not None else None
            if number is None or number == most or (limit is not None and most is None):
                continue
            yield found(
                "k8s-gpu-requests",
                ERROR,
                job.path,
                asked.line,
                f"{number} {name} are requested, and "
                + (f"the limit is {most}" if limit is not None else "no limit is set")
                + ": Kubernetes takes only a request that equals the limit",
                fix=f"limits: {{{name}: {number}}}, and leave the request out",
                column=asked.column,
                evidence=[(job.path, limit.line, f"{name}: {most}")] if limit is not None else (),
            )
            return


def check_processes_twice(job: ClusterJob) -> Iterator[Finding]:
    """Processes of a pod that the manifest says for the operator and on torchrun's line."""
    wanted = job.per_node.number() if job.per_node is not None else None
    if job.per_node is None or wanted is None or job.kind not in {"TrainJob", "PyTorchJob"}:
        return
    for launch in job.launches:
        word = launch.option("nproc_per_node")
        number = launch.number("nproc_per_node")
        if launch.program != "torchrun" or word is None or number in {None, wanted}:
            continue
        yield found(
            "world-size-hardcoded",
            WARNING,
            job.path,
            word.line,
            f"--nproc-per-node {number} starts {number} processes on each pod, and line "
            f"{job.per_node.line} says {wanted}",
            fix="leave the option out: the operator tells torchrun by PET_NPROC_PER_NODE",
            evidence=[(job.path, job.per_node.line, f"{wanted} processes on each pod")],
        )
        return


def check_ray_versions(job: ClusterJob) -> Iterator[Finding]:
    """Another Ray in the workers than in the head: the workers are not let in."""
    seen: list[tuple[str, Marked, str]] = []
    for pods in job.pods:
        image = pods.container.at("image") if pods.container is not None else None
        match = _RAY_IMAGE.search((image.text() or "") if image is not None else "")
        if image is not None and match is not None:
            seen.append((match[1], image, pods.role))
    for version, image, role in seen[1:]:
        first, place, other = seen[0]
        if version == first:
            continue
        yield found(
            "environment-differs-between-nodes",
            ERROR,
            job.path,
            image.line,
            f"the {role} pods run Ray {version} and the {other} pods {first}: Ray ends with "
            "`Version mismatch`",
            fix="one image for all pods, and rayVersion as its tag says",
            evidence=[(job.path, place.line, f"Ray {first}")],
        )
        return

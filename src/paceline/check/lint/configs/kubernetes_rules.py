"""What a manifest of Kubernetes does to the training it starts."""

import re
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.kubernetes import ClusterJob, Pods, read_jobs
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import INFO, WARNING, found
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context

_RAY = {"RayJob", "RayCluster"}


def check_manifest(path: str, documents: Sequence[Marked], context: Context) -> Iterator[Finding]:
    """Everything the documents of one file show."""
    jobs = read_jobs(path, documents)
    for job in jobs:
        scene = job.scene(context)
        for launch in job.launches:
            yield from check_launch(launch, scene)
        for pods in job.pods:
            variables = list(pods.variables(path).values())
            yield from check_variables(variables, scene.surroundings)
        yield from _check_shared_memory(job)
        yield from _check_images(job)
        yield from _check_processes(job)


def _workers(launch: Launch) -> int:
    word = launch.argument("num_workers", "dataloader_num_workers", "workers")
    return (whole(word.text) or 0) if word is not None else 0


def _check_shared_memory(job: ClusterJob) -> Iterator[Finding]:
    """64 MB of /dev/shm, which is what a container gets by itself. KubeRay mounts its own."""
    if job.kind in _RAY or not job.knows_volumes:
        return
    for pods in job.pods:
        if not pods.gpus or pods.spec.true("hostIPC"):
            continue
        mount = _mounted(pods)
        if mount is not None:
            limit = mount.at("emptyDir", "sizeLimit")
            size = _bytes(limit.text()) if limit is not None else None
            if limit is not None and size is not None and size < 2**30:
                yield found(
                    "shm-too-small",
                    job.path,
                    limit.line,
                    f"/dev/shm of {limit.text()} for the NCCL and DataLoader workers of "
                    f"{pods.gpus} GPUs",
                    fix="a sizeLimit of 16Gi or more",
                )
                return
            continue
        yield found(
            "shm-too-small",
            job.path,
            job.line,
            f"nothing is mounted at /dev/shm of the {pods.role} pods: {pods.gpus} GPUs get the "
            "64 MB a container has by itself",
            fix="a volume `emptyDir: {medium: Memory, sizeLimit: 16Gi}` mounted at /dev/shm",
            level=WARNING if any(map(_workers, job.launches)) else INFO,
        )
        return


def _mounted(pods: Pods) -> Marked | None:
    """The volume at /dev/shm, or an empty one where it is not in this file."""
    mounts = pods.container.at("volumeMounts") if pods.container is not None else None
    for mount in mounts.items() if mounts is not None else ():
        if (mount.text("mountPath") or "").rstrip("/") == "/dev/shm":
            volumes = pods.spec.at("volumes")
            for volume in volumes.items() if volumes is not None else ():
                if volume.text("name") == mount.text("name"):
                    return volume
            return Marked({}, mount.line)
    return None


_UNITS = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "K": 10**3,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


def _bytes(text: str | None) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTk]?i?)", (text or "").strip())
    return float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else None


KEEPS = {"IfNotPresent", "Never"}
"""With these a node starts the image that it has; without one, `latest` is pulled at each start."""


def _check_images(job: ClusterJob) -> Iterator[Finding]:
    """Images that may be another one on each node."""
    if job.num_pods < 2 or not job.num_gpus:
        return
    seen: dict[str, Marked] = {}
    for pods in job.pods:
        image = pods.container.at("image") if pods.container is not None else None
        text = image.text() if image is not None else None
        if image is None or text is None or "$" in text or "{{" in text or pods.role == "Launcher":
            continue
        last = text.rsplit("/", 1)[-1]
        if last.split(":")[0] != last.split(":")[0].lower():
            continue  # a place for an image: names of images are lower case (OCI distribution spec)
        keeps = pods.container is not None and pods.container.text("imagePullPolicy") in KEEPS
        if keeps and "@sha256:" not in text and (":" not in last or last.endswith(":latest")):
            yield found(
                "nccl-version-mismatch",
                job.path,
                image.line,
                f"{text} may be a different image on each of {job.num_pods} nodes, with a "
                "different NCCL",
                fix="name one build: a tag that never moves, or @sha256:...",
            )
            return
        if pods.gpus:
            seen.setdefault(text, image)
    if len(seen) > 1:
        (first, _), (second, place) = list(seen.items())[:2]
        if first.rsplit(":", 1)[0] == second.rsplit(":", 1)[0] or job.kind == "PyTorchJob":
            yield found(
                "nccl-version-mismatch",
                job.path,
                place.line,
                f"pods of one job run {first} and {second}",
                fix="one image for all pods",
            )


def _check_processes(job: ClusterJob) -> Iterator[Finding]:
    """Processes on each pod against its GPUs."""
    wanted = job.per_node.number() if job.per_node is not None else None
    if job.per_node is None or wanted is None:
        return
    for pods in job.pods:
        if pods.gpus and wanted > pods.gpus:
            yield found(
                "invalid-device-ordinal",
                job.path,
                job.per_node.line,
                f"{wanted} processes on each pod, and the {pods.role} pods have {pods.gpus} GPUs",
                fix=f"say {pods.gpus}, or ask for {wanted} GPUs",
            )
            return

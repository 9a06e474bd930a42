"""What a manifest of Kubernetes does to the training it starts."""

import re
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.images import check_image
from paceline.check.lint.configs.kubernetes import ClusterJob, Pods, read_jobs
from paceline.check.lint.configs.kubernetes_agreement import (
    check_gpu_requests,
    check_processes_twice,
    check_ray_versions,
)
from paceline.check.lint.configs.kubernetes_network import (
    check_master,
    check_network,
    check_policy,
    check_rdma,
)
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.configs.scene import started
from paceline.check.lint.configs.small_kinds import check_tf_variables
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context

_RAY = {"RayJob", "RayCluster"}


def check_manifest(path: str, documents: Sequence[Marked], context: Context) -> Iterator[Finding]:
    """Everything the documents of one file show."""
    services = {
        one.text("metadata", "name"): one for one in documents if one.text("kind") == "Service"
    }
    jobs = read_jobs(path, documents)
    for job in jobs:
        scene = job.scene(context)
        for launch in job.launches:
            yield from check_launch(launch, scene)
        for pods in job.pods:
            variables = list(pods.variables(path).values())
            yield from check_variables(variables, scene.surroundings)
            yield from check_tf_variables(variables)
            if job.knows_volumes:
                yield from check_rdma(job, pods)
            yield from check_network(job, pods)
            yield from check_master(job, pods, services)
        yield from _check_shared_memory(job)
        yield from _check_images(job)
        yield from _check_start(job)
        yield from _check_processes(job)
        yield from check_processes_twice(job)
        yield from check_gpu_requests(job)
        yield from _check_gang(job, documents)
        yield from _check_replicas_agree(job)
        yield from _check_world(job)
        if job.kind in _RAY:
            yield from _check_ray(job)
            yield from check_ray_versions(job)
        for pods in job.pods:
            image = pods.container.at("image") if pods.container is not None else None
            if image is not None and pods.gpus:
                yield from check_image(path, image.line, image.text() or "", context.gpu or job.gpu)
    for document in documents:
        if document.text("kind") == "NetworkPolicy":
            yield from check_policy(path, document)


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
                    ERROR,
                    job.path,
                    limit.line,
                    f"/dev/shm of {limit.text()} for the NCCL and DataLoader workers of "
                    f"{pods.gpus} GPUs",
                    fix="a sizeLimit of 16Gi or more",
                )
                return
            continue
        several = pods.gpus > 1 or any(_workers(each) for each in job.launches)
        yield found(
            "shm-too-small",
            ERROR if several else INFO,
            job.path,
            job.line,
            f"nothing is mounted at /dev/shm of the {pods.role} pods: {pods.gpus} GPUs get the "
            "64 MB a container has by itself",
            fix="a volume `emptyDir: {medium: Memory, sizeLimit: 16Gi}` mounted at /dev/shm",
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
                WARNING,
                job.path,
                image.line,
                f"{text} may be another image on each of {job.num_pods} nodes, with another NCCL",
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
                WARNING,
                job.path,
                place.line,
                f"pods of one job run {first} and {second}",
                fix="one image for all pods",
            )


def _check_start(job: ClusterJob) -> Iterator[Finding]:
    """Pods that start before the first one can be found."""
    if job.num_pods < 2 or job.kind not in {"PyTorchJob", "Job"}:
        return
    waits = any(pods.spec.at("initContainers") is not None for pods in job.pods)
    for pods in job.pods:
        for where in (pods.template, job.document):
            injected = where.at("metadata", "annotations", "sidecar.istio.io/inject")
            if injected is not None and injected.true():
                yield found(
                    "k8s-master-dns-not-ready",
                    WARNING,
                    job.path,
                    injected.line,
                    "the mesh's sidecar stands between the ranks and the first one",
                    fix='sidecar.istio.io/inject: "false"',
                )
    for pods in job.pods:
        if pods.restart is not None and pods.restart.text() == "Never" and not waits:
            yield found(
                "k8s-master-dns-not-ready",
                WARNING,
                job.path,
                pods.restart.line,
                f"a {pods.role} pod that starts before the first one can be found fails, and is "
                "not started again",
                fix="restartPolicy: OnFailure, or an init container that waits for the port",
            )
            return


def _check_processes(job: ClusterJob) -> Iterator[Finding]:
    """Processes on each pod against its GPUs."""
    wanted = job.per_node.number() if job.per_node is not None else None
    if job.per_node is None or wanted is None:
        return
    for pods in job.pods:
        if pods.gpus and wanted > pods.gpus:
            yield found(
                "invalid-device-ordinal",
                ERROR,
                job.path,
                job.per_node.line,
                f"{wanted} processes on each pod, and the {pods.role} pods have {pods.gpus} GPUs",
                fix=f"say {pods.gpus}, or ask for {wanted} GPUs",
            )
            return


def _check_gang(job: ClusterJob, documents: Sequence[Marked]) -> Iterator[Finding]:
    """Pods that have to run together."""
    spec = job.document.at("spec") or Marked({}, 0)
    total = sum(each.count for each in job.pods)
    if job.kind == "Job" and job.launches:
        parallel, wanted = spec.at("parallelism"), spec.number("completions")
        number = parallel.number() if parallel is not None else 1 if wanted else None
        if wanted and number is not None and number < wanted and _is_distributed(job):
            place = parallel if parallel is not None else spec.at("completions")
            yield found(
                "k8s-gang-partial",
                ERROR,
                job.path,
                place.line if place is not None else job.line,
                f"{number} of {wanted} pods run at a time, and each waits for all of them",
                fix=f"parallelism: {wanted}",
            )
    least = spec.at("runPolicy", "schedulingPolicy", "minAvailable") or spec.at("minAvailable")
    groups = [one for one in documents if one.text("kind") == "PodGroup"]
    if least is None and len(groups) == 1:
        least = groups[0].at("spec", "minMember")
    number = least.number() if least is not None else None
    if least is not None and number is not None and total > 1 and number != total:
        yield found(
            "k8s-gang-partial",
            ERROR if number > total else WARNING,
            job.path,
            least.line,
            f"{number} pods are waited for, and the job has {total}",
            fix=f"say {total}: the job trains with all or none",
        )
    elif least is None and job.num_pods > 1 and job.num_gpus and job.kind not in _RAY:
        text = str(job.document.plain("metadata")) + str(
            [one.template.plain("metadata") for one in job.pods]
        )
        if not re.search(r"queue-name|pod-group|volcano|coscheduling|kai\.scheduler", text):
            yield found(
                "k8s-gang-partial",
                INFO,
                job.path,
                job.line,
                f"nothing makes the {job.num_pods} pods start together: some may hold their GPUs "
                "and wait",
            )


def _is_distributed(job: ClusterJob) -> bool:
    return any(
        launch.program in {"torchrun", "accelerate", "deepspeed", "mlx"} for launch in job.launches
    )


_ALIKE = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NTHREADS",
    "NCCL_P2P_NET_CHUNKSIZE",
)


def _check_replicas_agree(job: ClusterJob) -> Iterator[Finding]:
    """NCCL's settings that must be the same on all ranks."""
    groups = [each for each in job.pods if each.gpus]
    for first in groups:
        for other in groups:
            mine, theirs = first.variables(job.path), other.variables(job.path)
            for name in _ALIKE:
                if name not in mine or first is other:
                    continue
                value = theirs[name].value if name in theirs else None
                if value == mine[name].value or (value is not None and first.role > other.role):
                    continue
                yield found(
                    "nccl-size-mismatch",
                    ERROR,
                    job.path,
                    mine[name].line,
                    f"{name}={mine[name].value} in the {first.role} pods, "
                    + (f"{value} in" if value is not None else "and nothing in")
                    + f" the {other.role} pods",
                    fix=f"set {name} alike in all pods, or nowhere",
                )


def _check_world(job: ClusterJob) -> Iterator[Finding]:
    """A world size that is written out."""
    for pods in job.pods:
        given = pods.variables(job.path).get("WORLD_SIZE")
        number = whole(given.value) if given is not None else None
        if given is None or number is None or job.num_pods < 2:
            continue
        per_pod = {started(each, job.scene(Context())).per_node for each in job.launches}
        sizes = {job.num_pods, job.num_gpus} | {
            job.num_pods * each for each in per_pod if each is not None
        }
        if number not in sizes:
            yield found(
                "store-clients-timeout",
                ERROR,
                job.path,
                given.line,
                f"WORLD_SIZE is {number}, and the job has {job.num_pods} pods with "
                f"{job.num_gpus} GPUs",
                fix="leave it to the launcher",
                column=given.column,
            )
            return


def _check_ray(job: ClusterJob) -> Iterator[Finding]:
    """What a Ray job asks of a cluster that cannot give it."""
    cluster = job.document.at("spec", "rayClusterSpec") or job.document.at("spec")
    if cluster is None:
        return
    listed = cluster.at("workerGroupSpecs")
    groups = list(listed.items()) if listed is not None else []
    head = cluster.at("headGroupSpec")
    scales = cluster.true("enableInTreeAutoscaling")
    total, most = 0, 0
    for group, pods in zip([*([head] if head else []), *groups], job.pods, strict=False):
        gpus = pods.gpus
        said = group.at("rayStartParams", "num-gpus")
        number = said.number() if said is not None else None
        if said is not None and number is not None:
            if number > gpus:
                yield found(
                    "ray-unsatisfiable-resources",
                    ERROR,
                    job.path,
                    said.line,
                    f"Ray is told of {number} GPUs on each {pods.role} pod, which has {gpus}",
                    fix=f"num-gpus: '{gpus}', or leave it out",
                )
            gpus = min(gpus, number)
        upper = group.number("maxReplicas")
        wanted = group.at("replicas")
        count = wanted.number() if wanted is not None else None
        if wanted is not None and count is not None and upper is not None and count > upper:
            yield found(
                "ray-unsatisfiable-resources",
                ERROR,
                job.path,
                wanted.line,
                f"{count} replicas, and maxReplicas is {upper}",
                fix=f"maxReplicas: {count}",
            )
        number_of = (upper if scales and upper is not None else pods.count) or 0
        number_of = 1 if group is head else number_of
        total += gpus * number_of
        most = max(most, gpus)
    yield from _check_entrypoint(job, total, most)


def _check_entrypoint(job: ClusterJob, total: int, most: int) -> Iterator[Finding]:
    driver = job.document.at("spec", "entrypointNumGpus")
    number = driver.number() if driver is not None else None
    if driver is not None and number is not None and number > most:
        yield found(
            "ray-unsatisfiable-resources",
            ERROR,
            job.path,
            driver.line,
            f"the entrypoint asks for {number} GPUs on one node, and the largest has {most}",
            fix=f"entrypointNumGpus: {most} at most; the driver of Ray Train needs none",
        )
    for launch in job.launches:
        word = launch.argument(
            "num_workers", "num_gpu_workers", "ray_num_workers", "num_train_workers", "num_gpus"
        )
        each = launch.argument("gpus_per_worker", "num_gpus_per_worker")
        wanted = whole(word.text) if word is not None else None
        per_worker = (whole(each.text) or 1) if each is not None else 1
        if word is None or wanted is None or wanted * per_worker <= total:
            continue
        sure = each is not None or launch.argument("use_gpu") is not None
        sure = sure or launch.argument("num_workers") is None
        yield found(
            "ray-unsatisfiable-resources",
            ERROR if sure or total else INFO,
            job.path,
            word.line,
            f"{wanted} workers with {per_worker} GPU each, and the cluster has {total} GPUs",
            fix=f"{total // per_worker} workers, or more nodes",
        )

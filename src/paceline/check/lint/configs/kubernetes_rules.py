"""What a manifest of Kubernetes does to the training it starts."""

from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.kubernetes import ClusterJob, read_jobs
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import found
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context


def check_manifest(path: str, documents: Sequence[Marked], context: Context) -> Iterator[Finding]:
    """Everything the documents of one file show."""
    jobs = read_jobs(path, documents)
    for job in jobs:
        scene = job.scene(context)
        for launch in job.launches:
            yield from check_launch(launch, scene)
        for pods in job.pods:
            variables = list(pods.variables(path).values())
            yield from check_variables(variables, scene.known)
        yield from _check_images(job)
        yield from _check_processes(job)


KEEPS = {"IfNotPresent", "Never"}
"""With these a node starts the image that it has; without one, `latest` is pulled at each start."""


def _check_images(job: ClusterJob) -> Iterator[Finding]:
    """Images that may be another one on each node."""
    if job.num_pods < 2 or not job.num_gpus:
        return
    seen: dict[str, Marked] = {}
    for pods in job.pods:
        image = pods.container.at("image")
        text = image.text() if image is not None else None
        if image is None or text is None or "$" in text or "{{" in text or pods.role == "Launcher":
            continue
        last = text.rsplit("/", 1)[-1]
        if last.split(":")[0] != last.split(":")[0].lower():
            continue  # a place for an image: names of images are lower case (OCI distribution spec)
        keeps = pods.container.text("imagePullPolicy") in KEEPS
        if keeps and "@sha256:" not in text and (":" not in last or last.endswith(":latest")):
            what = (
                f"{text} may be a different image on each of {job.num_pods} nodes, with a "
                "different NCCL"
            )
            fix = "name one build: a tag that never moves, or @sha256:..."
            yield found("nccl-version-mismatch", job.path, image.line, what, fix)
            return
        if pods.gpus:
            seen.setdefault(text, image)
    if len(seen) > 1:
        (first, _), (second, place) = list(seen.items())[:2]
        if first.rsplit(":", 1)[0] == second.rsplit(":", 1)[0] or job.kind == "PyTorchJob":
            what = f"pods of one job run {first} and {second}"
            fix = "one image for all pods"
            yield found("nccl-version-mismatch", job.path, place.line, what, fix)


def _check_processes(job: ClusterJob) -> Iterator[Finding]:
    """Processes on each pod against its GPUs."""
    wanted = job.per_node.number() if job.per_node is not None else None
    if job.per_node is None or wanted is None:
        return
    for pods in job.pods:
        if pods.gpus and wanted > pods.gpus:
            what = f"{wanted} processes on each pod, and the {pods.role} pods have {pods.gpus} GPUs"
            fix = f"say {pods.gpus}, or ask for {wanted} GPUs"
            yield found("invalid-device-ordinal", job.path, job.per_node.line, what, fix)
            return

"""Kubernetes manifests of training jobs, as groups of equal pods.

PyTorchJob, TFJob and MPIJob of the training operator, JobSet, plain Job, StatefulSet, Volcano's Job
and RayCluster.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.check.lint.configs.launch_line import Launch, read_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import Fault
from paceline.check.lint.configs.scene import check_launch
from paceline.check.lint.configs.shell import Word, commands_of
from paceline.check.lint.configs.variables import Variable, check_variables
from paceline.check.lint.context import Context
from paceline.check.lint.words import words_of

KINDS = words_of("kubernetes", "training_kinds")
"""Kinds that start training processes, or may."""

_GPU = re.compile(r"^(nvidia\.com/(gpu|mig-.*)|amd\.com/gpu|gpu\.intel\.com/.*|habana\.ai/gaudi)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Equal pods of one job."""

    role: str
    """`Master`, `Worker`, `node` ..."""

    count: int
    spec: Marked
    container: Marked
    """The container that trains: the one with GPUs, or the first."""

    @property
    def gpus(self) -> int:
        """Accelerators of one pod: its limits, or what it requests."""
        limits = self.container.entries("resources", "limits")
        for name, value in (*limits, *self.container.entries("resources", "requests")):
            if _GPU.match(name):
                return value.number() or 0
        return 0

    def variables(self) -> Iterator[Variable]:
        """The container's environment; what comes from a secret has an empty text."""
        for entry in self.container.items("env"):
            name, place = entry.text("name"), entry.at("value") or entry
            if name is not None:
                value = entry.text("value") or ""
                yield Variable(name=name, value=value, line=place.line, column=place.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job of a manifest."""

    path: str
    kind: str
    pods: Sequence[Pods]
    per_node: Marked | None = None
    launches: Sequence[Launch] = field(default_factory=tuple)

    @property
    def num_pods(self) -> int:
        """Pods that train; MPI's launcher does not."""
        return sum(each.count for each in self.pods if each.role != "Launcher")

    @property
    def num_gpus(self) -> int:
        return sum(each.count * each.gpus for each in self.pods)

    def known(self, context: Context) -> Context:
        """What its launch lines are judged by."""
        gpus = max((each.gpus for each in self.pods), default=0)
        per_node = self.per_node.number() if self.per_node is not None else None
        nodes = self.num_pods or None
        return replace(context, nodes=nodes, gpus_per_node=gpus or None, devices=per_node)


def is_manifest(documents: Sequence[Marked]) -> bool:
    """Whether these documents are objects of Kubernetes."""
    return any(one.at("apiVersion") is not None and one.at("kind") is not None for one in documents)


def read_jobs(path: str, documents: Sequence[Marked]) -> list[ClusterJob]:
    """The training jobs of a manifest."""
    jobs = (_read(path, one.text("kind") or "", one) for one in documents)
    return [job for job in jobs if job is not None]


def _read(path: str, kind: str, document: Marked) -> ClusterJob | None:
    if kind not in KINDS:
        return None
    pods = list(_pods_in(document))
    per_node = document.at("spec", "nprocPerNode")
    job = ClusterJob(path=path, kind=kind, pods=pods, per_node=per_node)
    launches = list(_launches(job))
    if kind in {"Job", "StatefulSet", "Pod"} and not launches and not job.num_gpus:
        return None
    return replace(job, launches=tuple(launches))


_COUNTS = (("replicas", "minReplicas"), ("completions", "parallelism"), ("numOfHosts",))
"""Keys whose numbers multiply the pods below them; the first of each that is there."""


def _pods_in(holder: Marked, role: str = "", count: int = 1) -> Iterator[Pods]:
    """Every pod specification at or below a value, as often as what it stands in says."""
    for names in _COUNTS:
        numbers = (holder.number(name) for name in names)
        count *= next((number for number in numbers if number is not None), 1)
    role = holder.text("name") or holder.text("groupName") or role
    if containers := list(holder.items("containers")):
        yield Pods(role=role, count=count, spec=holder, container=_trainer(containers))
        return
    for key, value in holder.entries():
        if key not in {"metadata", "submitterPodTemplate"}:
            yield from _pods_in(value, role if key in {"spec", "template"} else key, count)
    for value in holder.items():
        yield from _pods_in(value, role, count)


def _trainer(containers: Sequence[Marked]) -> Marked:
    limits = ((one, dict(one.entries("resources", "limits"))) for one in containers)
    return next((one for one, each in limits if any(map(_GPU.match, each))), containers[0])


def _launches(job: ClusterJob) -> Iterator[Launch]:
    """What the containers start."""
    for pods in job.pods:
        words = [
            Word(str(each.value), each.text_line or each.line, each.column)
            for key in ("command", "args")
            for each in pods.container.items(key)
            if not isinstance(each.value, dict | list)
        ]
        for command in commands_of(tuple(words)):
            told = not job.kind.startswith("Ray")
            if (launch := read_launch(job.path, command, is_told=told)) is not None:
                yield launch


def check_manifest(path: str, documents: Sequence[Marked], context: Context) -> Iterator[Fault]:
    """What the documents of one file do to the training they start."""
    for job in read_jobs(path, documents):
        known = job.known(context)
        for launch in job.launches:
            yield from check_launch(launch, known, context)
        for pods in job.pods:
            yield from check_variables(pods.variables(), known)
        yield from _check_images(job)


KEEPS = {"IfNotPresent", "Never"}
"""With these a node starts the image that it has; without one, `latest` is pulled at each start."""


def _check_images(job: ClusterJob) -> Iterator[Fault]:
    """Images that may be another one on each node."""
    if job.num_pods < 2 or not job.num_gpus:
        return
    for pods in job.pods:
        image = pods.container.at("image")
        text = image.text() if image is not None else None
        if image is None or text is None or re.search(r"\$|\{\{", text) or pods.role == "Launcher":
            continue
        last = text.rsplit("/", 1)[-1]
        if re.search("[A-Z]", last.split(":")[0]):
            continue  # a place for an image: names of images are lower case (OCI distribution spec)
        keeps = pods.container.text("imagePullPolicy") in KEEPS
        if keeps and "@sha256:" not in text and (":" not in last or last.endswith(":latest")):
            what = (
                f"{text} may be a different image on each of {job.num_pods} nodes, with a "
                "different NCCL"
            )
            fix = "name one build: a tag that never moves, or @sha256:..."
            yield Fault("nccl-version-mismatch", image, what, fix)
            return

"""Kubernetes manifests of training jobs, as groups of equal pods.

PyTorchJob, TFJob and MPIJob of the training operator, TrainJob with its runtime, JobSet, plain Job,
StatefulSet, Volcano's Job, RayJob and RayCluster. Several documents of one file are read together.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.catalog.generation import gpu_in
from paceline.check.lint.configs.launch_line import Launch, read_launch
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import Fault
from paceline.check.lint.configs.scene import Scene
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

    resources: Marked | None = None
    """Resources of a TrainJob, which replace the container's."""

    @property
    def gpus(self) -> int:
        """Accelerators of one pod: its limits, or what it requests."""
        for resources in filter(None, (self.resources, self.container.at("resources"))):
            for name, value in (*resources.entries("limits"), *resources.entries("requests")):
                if _GPU.match(name):
                    return value.number() or 0
        return 0

    def variables(self) -> dict[str, Variable]:
        """The container's environment; what comes from a secret has an empty text."""
        found = {}
        for entry in self.container.items("env"):
            name, place = entry.text("name"), entry.at("value") or entry
            if name is not None:
                value = entry.text("value") or ""
                found[name] = Variable(name=name, value=value, line=place.line, column=place.column)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job of a manifest."""

    path: str
    kind: str
    document: Marked
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

    @property
    def gpu(self) -> str | None:
        """The kind of GPU that node selectors ask for."""
        labels = (each for pods in self.pods for each in pods.spec.entries("nodeSelector"))
        named = (value.text() or "" for key, value in labels if re.search("gpu|accelerator", key))
        return next(filter(None, map(gpu_in, named)), None)

    def scene(self, context: Context) -> Scene:
        """What its launch lines are judged by."""
        gpus = max((each.gpus for each in self.pods), default=0)
        context = replace(context, gpu=self.gpu or context.gpu)
        return Scene(
            nodes=self.num_pods or None,
            gpus_per_node=gpus or None,
            tasks_per_node=self.per_node.number() if self.per_node is not None else None,
            scheduler="ray" if self.kind.startswith("Ray") else "kubernetes",
            context=context,
        )


def is_manifest(documents: Sequence[Marked]) -> bool:
    """Whether these documents are objects of Kubernetes."""
    return any(one.at("apiVersion") is not None and one.at("kind") is not None for one in documents)


def read_jobs(path: str, documents: Sequence[Marked]) -> list[ClusterJob]:
    """The training jobs of a manifest."""
    jobs = (_read(path, one.text("kind") or "", one, documents) for one in documents)
    return [job for job in jobs if job is not None]


def _read(path: str, kind: str, document: Marked, documents: Sequence[Marked]) -> ClusterJob | None:
    if kind not in KINDS:
        return None
    is_runtime = kind in {"TrainingRuntime", "ClusterTrainingRuntime"}
    if is_runtime and any(one.text("kind") == "TrainJob" for one in documents):
        return None  # judged as the TrainJob that uses it
    per_node = document.at("spec", "nprocPerNode")
    if kind == "TrainJob":
        pods, per_node = _read_train_job(document, documents)
    else:
        pods = list(_pods_in(document))
    job = ClusterJob(path=path, kind=kind, document=document, pods=pods, per_node=per_node)
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


def _read_train_job(
    document: Marked, documents: Sequence[Marked]
) -> tuple[list[Pods], Marked | None]:
    """A TrainJob's pods: its runtime's, with what the trainer's own section replaces; and the
    number of processes on each."""
    trainer = document.at("spec", "trainer") or Marked({}, document.line)
    wanted = document.text("spec", "runtimeRef", "name")
    runtime = next(
        (
            one
            for one in documents
            if one.text("kind") in {"TrainingRuntime", "ClusterTrainingRuntime"}
            and one.text("metadata", "name") == wanted
        ),
        Marked({}, 0),
    )
    policy = runtime.at("spec", "mlPolicy") or Marked({}, 0)
    per_node = trainer.at("numProcPerNode") or policy.at("torch", "numProcPerNode")
    nodes = trainer.number("numNodes") or policy.number("numNodes") or 1
    own = {key: each for key, each in trainer.entries() if key in {"image", "command", "args"}}
    empty = Pods(role="node", count=1, spec=trainer, container=Marked({}, trainer.line))
    pods = []
    for each in list(_pods_in(runtime)) or [empty]:
        env = [*each.container.items("env"), *trainer.items("env")]
        whole = dict(each.container.entries()) | own
        whole |= {"env": Marked(env, env[0].line)} if env else {}
        container, resources = Marked(whole, each.container.line), trainer.at("resourcesPerNode")
        pods.append(replace(each, count=nodes, container=container, resources=resources))
    return pods, per_node


def _trainer(containers: Sequence[Marked]) -> Marked:
    limits = ((one, dict(one.entries("resources", "limits"))) for one in containers)
    return next((one for one, each in limits if any(map(_GPU.match, each))), containers[0])


def _launches(job: ClusterJob) -> Iterator[Launch]:
    """What the containers, or a RayJob's entrypoint, start."""
    entry = job.document.at("spec", "entrypoint")
    starts = [
        (
            pods.variables(),
            [
                Word(str(each.value), each.text_line or each.line, each.column, single=True)
                for key in ("command", "args")
                for each in pods.container.items(key)
                if not isinstance(each.value, dict | list)
            ],
        )
        for pods in job.pods
    ]
    if job.kind == "RayJob" and entry is not None and isinstance(entry.value, str):
        text = Word(entry.value, entry.text_line or entry.line, single=True)
        words = [Word("bash", entry.line), Word("-c", entry.line), text]
        starts = [(job.pods[0].variables() if job.pods else {}, words)]
    for environment, words in starts:
        for command in commands_of(tuple(words)):
            if (launch := read_launch(job.path, command, environment)) is not None:
                yield launch


def check_manifest(path: str, documents: Sequence[Marked], context: Context) -> Iterator[Fault]:
    """What the documents of one file do to the training they start."""
    for job in read_jobs(path, documents):
        scene = job.scene(context)
        for launch in job.launches:
            yield from check_launch(launch, scene)
        for pods in job.pods:
            yield from check_variables(pods.variables().values(), scene.known)
        yield from _check_images(job)
        wanted = job.per_node.number() if job.per_node is not None else None
        few = next((one for one in job.pods if wanted and 0 < one.gpus < wanted), None)
        if job.per_node is not None and few is not None:
            what = f"{wanted} processes on each pod, and the {few.role} pods have {few.gpus} GPUs"
            fix = f"say {few.gpus}, or ask for {wanted} GPUs"
            yield Fault("invalid-device-ordinal", job.per_node, what, fix)


KEEPS = {"IfNotPresent", "Never"}
"""With these a node starts the image that it has; without one, `latest` is pulled at each start."""


def _check_images(job: ClusterJob) -> Iterator[Fault]:
    """Images that may be another one on each node."""
    if job.num_pods < 2 or not job.num_gpus:
        return
    seen: dict[str, Marked] = {}
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
        if pods.gpus:
            seen.setdefault(text, image)
    if len(seen) > 1:
        (first, _), (second, place) = list(seen.items())[:2]
        if first.rsplit(":", 1)[0] == second.rsplit(":", 1)[0] or job.kind == "PyTorchJob":
            what = f"pods of one job run {first} and {second}"
            yield Fault("nccl-version-mismatch", place, what, "one image for all pods")

"""Kubernetes manifests of training jobs, as groups of equal pods.

PyTorchJob, TFJob and MPIJob of the training operator, TrainJob with its runtime, JobSet, plain Job,
StatefulSet, Volcano's Job, RayJob and RayCluster. Several documents of one file are read together.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.catalog.generation import gpu_in
from paceline.check.lint.configs.launch_line import Launch, read_launch
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.scene import Scene
from paceline.check.lint.configs.shell import Word, commands_of
from paceline.check.lint.configs.variables import Variable
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
    container: Marked | None
    """The container that trains: the one with GPUs, or the first."""

    resources: Marked | None = None
    """Resources of a TrainJob, which replace the container's."""

    @property
    def gpus(self) -> int:
        """Accelerators of one pod."""
        return sum(number for _, number, _ in self._asked() if number)

    def _resources(self) -> Iterator[Marked]:
        for found in (self.resources, self.container and self.container.at("resources")):
            if found is not None:
                yield found

    def _asked(self) -> Iterator[tuple[str, int | None, Marked]]:
        for resources in self._resources():
            seen = False
            for side in ("limits", "requests"):
                entries = resources.at(side)
                for name, value in entries.entries() if entries is not None else ():
                    if _GPU.match(name) and not seen:
                        seen = True
                        yield name, resources.number(side, name), value
            if seen:
                return

    def variables(self, path: str) -> dict[str, Variable]:
        """The container's environment; what comes from a secret has an empty text."""
        found = {}
        listed = self.container.at("env") if self.container is not None else None
        for entry in listed.items() if listed is not None else ():
            name, value = entry.text("name"), entry.at("value")
            if name is None:
                continue
            place = value if value is not None else entry
            found[name] = Variable(
                name=name,
                value=entry.text("value") or "",
                path=path,
                line=place.line,
                column=place.column,
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job of a manifest."""

    path: str
    kind: str
    name: str
    document: Marked
    pods: Sequence[Pods]
    per_node: Marked | None = None
    launches: Sequence[Launch] = field(default_factory=tuple)

    @property
    def line(self) -> int:
        kind = self.document.at("kind")
        return kind.line if kind is not None else self.document.line

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
        for pods in self.pods:
            wanted = pods.spec.plain("nodeSelector") or {}
            for label, value in wanted.items():
                gpu = gpu_in(str(value)) if "gpu" in label or "accelerator" in label else None
                if gpu is not None:
                    return gpu
        return None

    def scene(self, context: Context) -> Scene:
        """What its launch lines are judged by."""
        gpus = max((each.gpus for each in self.pods), default=0)
        context = replace(context, gpu=self.gpu or context.gpu)
        return Scene(
            nodes=self.num_pods or None,
            gpus_per_node=gpus or None,
            tasks_per_node=self._processes(),
            scheduler="ray" if self.kind.startswith("Ray") else "kubernetes",
            context=context,
        )

    def _processes(self) -> int | None:
        return self.per_node.number() if self.per_node is not None else None


def is_manifest(documents: Sequence[Marked]) -> bool:
    """Whether these documents are objects of Kubernetes."""
    return any(one.at("apiVersion") is not None and one.at("kind") is not None for one in documents)


def read_jobs(path: str, documents: Sequence[Marked]) -> list[ClusterJob]:
    """The training jobs of a manifest."""
    found: list[ClusterJob] = []
    for document in documents:
        kind = document.text("kind") or ""
        if kind not in KINDS:
            continue
        job = _read(path, kind, document, documents)
        if job is not None:
            found.append(job)
    return found


def _read(path: str, kind: str, document: Marked, documents: Sequence[Marked]) -> ClusterJob | None:
    name = document.text("metadata", "name") or ""
    pods: list[Pods] = []
    per_node: Marked | None = None
    if kind in {"PyTorchJob", "TFJob", "MPIJob"}:
        key = {"PyTorchJob": "pytorch", "TFJob": "tf", "MPIJob": "mpi"}[kind] + "ReplicaSpecs"
        for role, replica in (document.at("spec", key) or Marked({}, 0)).entries():
            _add(pods, role, replica.number("replicas") or 1, replica, "template", "spec")
        per_node = document.at("spec", "nprocPerNode")
    elif kind in {"TrainingRuntime", "ClusterTrainingRuntime", "JobSet"}:
        inside = ("spec",) if kind == "JobSet" else ("spec", "template", "spec")
        _add_replicated(pods, document.at(*inside, "replicatedJobs"))
        if kind != "JobSet" and any(one.text("kind") == "TrainJob" for one in documents):
            return None  # judged as the TrainJob that uses it
    elif kind == "TrainJob":
        per_node = _read_train_job(pods, document, documents)
    elif kind == "Job" and document.at("spec", "tasks") is not None:  # Volcano's
        for task in (document.at("spec", "tasks") or Marked([], 0)).items():
            _add(
                pods,
                task.text("name") or "task",
                task.number("replicas") or 1,
                task,
                "template",
                "spec",
            )
    elif kind in {"Job", "StatefulSet"}:
        spec = document.at("spec")
        if spec is None:
            return None
        count = spec.number("completions") or spec.number("parallelism") or spec.number("replicas")
        _add(pods, "pod", count or 1, spec, "template", "spec")
    elif kind == "Pod":
        _add(pods, "pod", 1, document, "spec")
    else:
        _add_ray(pods, document)
    job = ClusterJob(
        path=path,
        kind=kind,
        name=name,
        document=document,
        pods=pods,
        per_node=per_node,
    )
    launches = list(_launches(job))
    if kind in {"Job", "StatefulSet", "Pod"} and not launches and not job.num_gpus:
        return None
    return replace(job, launches=tuple(launches))


def _add(pods: list[Pods], role: str, count: int, holder: Marked, *inside: str) -> None:
    spec = holder.at(*inside)
    if spec is None:
        return
    container = _trainer(spec)
    pods.append(
        Pods(
            role=role,
            count=count,
            spec=spec,
            container=container,
        )
    )


def _add_replicated(pods: list[Pods], jobs: Marked | None) -> None:
    for job in jobs.items() if jobs is not None else ():
        inner = job.at("template", "spec")
        if inner is None:
            continue
        each = inner.number("completions") or inner.number("parallelism") or 1
        _add(
            pods,
            job.text("name") or "job",
            (job.number("replicas") or 1) * each,
            inner,
            "template",
            "spec",
        )


def _add_ray(pods: list[Pods], document: Marked) -> None:
    cluster = document.at("spec", "rayClusterSpec") or document.at("spec")
    if cluster is None:
        return
    head = cluster.at("headGroupSpec")
    if head is not None:
        _add(pods, "head", 1, head, "template", "spec")
    for group in (cluster.at("workerGroupSpecs") or Marked([], 0)).items():
        hosts = group.number("numOfHosts") or 1
        count = group.number("replicas")
        _add(
            pods,
            group.text("groupName") or "workers",
            (count if count is not None else group.number("minReplicas") or 0) * hosts,
            group,
            "template",
            "spec",
        )


def _read_train_job(
    pods: list[Pods], document: Marked, documents: Sequence[Marked]
) -> Marked | None:
    """A TrainJob's pods: its runtime's, with what the trainer's own section replaces."""
    trainer = document.at("spec", "trainer") or Marked({}, document.line)
    wanted = document.text("spec", "runtimeRef", "name")
    runtime = next(
        (
            one
            for one in documents
            if one.text("kind") in {"TrainingRuntime", "ClusterTrainingRuntime"}
            and one.text("metadata", "name") == wanted
        ),
        None,
    )
    nodes = trainer.number("numNodes")
    base: list[Pods] = []
    per_node = trainer.at("numProcPerNode")
    if runtime is not None:
        _add_replicated(base, runtime.at("spec", "template", "spec", "replicatedJobs"))
        policy = runtime.at("spec", "mlPolicy")
        if policy is not None:
            nodes = nodes or policy.number("numNodes")
            per_node = per_node or policy.at("torch", "numProcPerNode")
    nodes = nodes or 1
    if not base:
        container = Marked(dict(trainer.entries()), trainer.line)
        pods.append(
            Pods(
                role="node",
                count=nodes,
                spec=trainer,
                container=container,
                resources=trainer.at("resourcesPerNode"),
            )
        )
        return per_node
    for each in base:
        entries = _entries_of(each.container)
        own = _entries_of(trainer)
        listed = [
            *(entries["env"].items() if "env" in entries else ()),
            *(own["env"].items() if "env" in own else ()),
        ]
        merged = dict(entries)
        merged.update({key: own[key] for key in ("image", "command", "args") if key in own})
        if listed:
            merged["env"] = Marked(listed, listed[0].line)
        place = each.container.line if each.container is not None else each.spec.line
        pods.append(
            Pods(
                role=each.role,
                count=nodes,
                spec=each.spec,
                container=Marked(merged, place),
                resources=trainer.at("resourcesPerNode"),
            )
        )
    return per_node


def _entries_of(holder: Marked | None) -> dict[str, Marked]:
    found: dict[str, Marked] = {}
    if holder is not None:
        found.update(holder.entries())
    return found


def _trainer(spec: Marked) -> Marked | None:
    listed = spec.at("containers")
    containers = list(listed.items()) if listed is not None else []
    for one in containers:
        limits = one.at("resources", "limits")
        if limits is not None and any(_GPU.match(name) for name, _ in limits.entries()):
            return one
    return containers[0] if containers else None


def _launches(job: ClusterJob) -> Iterator[Launch]:
    """What the containers, or a RayJob's entrypoint, start."""
    entry = job.document.at("spec", "entrypoint")
    if job.kind == "RayJob" and entry is not None and isinstance(entry.value, str):
        words: tuple[Word, ...] = (
            Word("bash", entry.line),
            Word("-c", entry.line),
            Word(entry.value, entry.text_line or entry.line, single=True),
        )
        environment = job.pods[0].variables(job.path) if job.pods else {}
        for command in commands_of(job.path, words):
            if (launch := read_launch(job.path, command, environment)) is not None:
                yield launch
        return
    for pods in job.pods:
        if pods.container is None:
            continue
        words = tuple(
            Word(str(each.value), each.text_line or each.line, each.column, single=True)
            for key in ("command", "args")
            for each in (pods.container.at(key) or Marked([], 0)).items()
            if not isinstance(each.value, dict | list)
        )
        environment = pods.variables(job.path)
        for command in commands_of(job.path, words):
            launch = read_launch(job.path, command, environment)
            if launch is not None:
                yield launch

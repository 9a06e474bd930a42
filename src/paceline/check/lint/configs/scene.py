"""What is known of the job that a launch line belongs to: nodes, GPUs, tasks, who starts it."""

import re
from dataclasses import dataclass, field, replace
from math import prod

from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.shell import Option, Script, Word
from paceline.check.lint.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is known of the job of one file. None is unknown."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    scheduler: str | None = None
    """`slurm` or `kubernetes`."""

    context: Context = field(default_factory=Context)

    @property
    def known(self) -> Context:
        """The context on this job's nodes."""
        return replace(self.context, nodes=self.nodes)

    def number(self, text: str | None) -> int | None:
        """The number a text stands for, Slurm's variables read from the #SBATCH lines."""
        text = (text or "").strip()
        product = re.fullmatch(r"\$\(\((.+)\)\)", text)
        if product is not None:
            names = (re.sub(r"^(?![\d$])", "$", part.strip()) for part in product[1].split("*"))
            numbers = [self.number(name) for name in names]
            return None if None in numbers else prod(one for one in numbers if one is not None)
        name = re.fullmatch(r"\$\{?SLURM_(\w+)\}?", text)
        if name is None:
            return whole(text)
        tasks = (self.tasks_per_node or 0) * (self.nodes or 0) or None
        return {
            "NNODES": self.nodes,
            "JOB_NUM_NODES": self.nodes,
            "GPUS_ON_NODE": self.gpus_per_node,
            "GPUS_PER_NODE": self.gpus_per_node,
            "NTASKS_PER_NODE": self.tasks_per_node,
            "NTASKS": tasks,
            "NPROCS": tasks,
        }.get(name[1])


def scene_of(script: Script, context: Context) -> Scene:
    """The scene of a shell script: its #SBATCH lines first, then what the context knows."""
    options = script.sbatch

    def count(name: str) -> int | None:
        return whole(options[name].value) if name in options else None

    nodes, tasks, all_tasks = count("nodes"), count("ntasks-per-node"), count("ntasks")
    gpus = _gpus(options.get("gpus-per-node")) or _gpus(options.get("gres"))
    total, per_task = _gpus(options.get("gpus")), _gpus(options.get("gpus-per-task"))
    if script.is_batch and "nodes" not in options and all_tasks in {None, 1}:
        nodes = context.nodes or 1  # what Slurm gives when nothing is said
    if gpus is None and total is not None and nodes:
        gpus = total // nodes
    if tasks is None and all_tasks is not None and nodes:
        tasks = all_tasks // nodes
    if gpus is None and per_task is not None and tasks:
        gpus = per_task * tasks
    if script.is_batch and tasks is None and all_tasks is None:
        tasks = 1  # a task a node is Slurm's default
    return Scene(
        nodes=nodes if nodes is not None else context.nodes,
        gpus_per_node=gpus if gpus is not None else context.gpus_per_node,
        tasks_per_node=tasks,
        scheduler="slurm" if script.is_batch else None,
        context=context,
    )


def _gpus(option: Option | None) -> int | None:
    """`8`, `a100:8`, `gpu:8`, `gpu:a100:8(S:0-1)`."""
    if option is None:
        return None
    text = option.value.split("(")[0]
    if "gpu" in text:
        text = next((part for part in text.split(",") if part.startswith("gpu")), text)
    last = text.rsplit(":", 1)[-1]
    return int(last) if last.isdigit() else None


@dataclass(frozen=True, slots=True)
class Started:
    """How many processes a launch starts; None is unknown."""

    nodes: int | None
    per_node: int | None
    world: int | None


def started(launch: Launch, scene: Scene) -> Started:
    """Nodes, processes on each, and all of them, as the launch line says.

    A word that is a variable, whose text is not known, may hold the launcher's options.
    """
    if launch.target is not None and launch.target.text.startswith("$"):
        return Started(None, None, None)

    def number(word: Word | None) -> int | None:
        return scene.number(word.text) if word is not None else None

    def option(*names: str) -> int | None:
        return number(launch.option(*names))

    nodes: int | None = None
    per_node: int | None = None
    world: int | None = None
    if launch.program == "torchrun":
        told = scene.scheduler == "kubernetes"  # the operator sets PET_NNODES and the like
        each = launch.option("nproc_per_node")
        nodes = option("nnodes") if "nnodes" in launch.options else scene.nodes if told else 1
        per_node = number(each)
        if each is None:
            per_node = (scene.tasks_per_node or scene.gpus_per_node) if told else 1
        elif each.text in {"gpu", "auto"}:
            per_node = scene.gpus_per_node
    elif launch.program == "accelerate":
        world, nodes = option("num_processes"), option("num_machines")
        if world is not None and not {"num_machines", "config_file"} & set(launch.options):
            nodes = 1
    elif launch.program == "deepspeed":
        many = launch.option("hostfile", "H", "num_nodes", "include", "i") is not None
        nodes = option("num_nodes") or (None if many else 1)
        per_node = option("num_gpus", "num_accelerators") or scene.gpus_per_node
    elif launch.program == "python" and "srun" in launch.wrappers:
        nodes, world = scene.nodes, number(launch.wrapper("srun", "ntasks", "n"))
        each = launch.wrapper("srun", "ntasks_per_node")
        if launch.wrapper("srun", "ntasks", "n") is None:
            per_node = number(each) if each is not None else scene.tasks_per_node
    elif (tasks := launch.wrapper("mpirun", "np", "n")) is not None:
        world = number(tasks)
    else:
        nodes = scene.nodes
    if world is not None and nodes:
        per_node = world // nodes
    elif nodes is not None and per_node is not None:
        world = nodes * per_node
    return Started(nodes, per_node, world)

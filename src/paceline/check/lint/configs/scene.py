"""What is known of the job that a launch line belongs to: nodes, GPUs, tasks, who starts it."""

import re
from dataclasses import dataclass, field, replace

from paceline.catalog.generation import gpu_in
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.shell import Option, Script
from paceline.check.lint.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is known of the job of one file. None is unknown."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    scheduler: str | None = None
    """`slurm` or `kubernetes`."""

    context: Context = field(default_factory=Context)

    @property
    def known(self) -> Context:
        """The context on this job's nodes."""
        return replace(self.context, nodes=self.nodes)

    def number(self, text: str | None) -> int | None:
        """The number a text stands for, Slurm's variables read from the #SBATCH lines."""
        if text is None:
            return None
        tasks = (self.tasks_per_node or 0) * (self.nodes or 0) or None
        known = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_GPUS_PER_NODE": self.gpus_per_node,
            "SLURM_NTASKS_PER_NODE": self.tasks_per_node,
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_CPUS_PER_TASK": self.cpus_per_task,
        }
        name = re.fullmatch(r"\$\{?(SLURM_\w+)\}?", text.strip())
        if name is not None:
            return known.get(name[1])
        product = re.fullmatch(r"\$\(\((.+)\)\)", text.strip())
        if product is not None:
            parts = [self.number(_as_variable(part)) for part in product[1].split("*")]
            total = 1
            for part in parts:
                if part is None:
                    return None
                total *= part
            return total
        return whole(text)


def _as_variable(part: str) -> str:
    part = part.strip()
    return part if re.match(r"[\d$]", part) else f"${part}"


def scene_of(script: Script, context: Context) -> Scene:
    """The scene of a shell script: its #SBATCH lines first, then what the context knows."""
    options = dict(script.sbatch)
    nodes = _count(options.get("nodes"))
    gpus = _gpus(options.get("gpus-per-node")) or _gpus(options.get("gres"))
    total = _gpus(options.get("gpus"))
    tasks = _count(options.get("ntasks-per-node"))
    all_tasks = _count(options.get("ntasks"))
    if script.is_batch and nodes is None and "nodes" not in options and all_tasks in {None, 1}:
        nodes = context.nodes or 1  # what Slurm gives when nothing is said
    if gpus is None and total is not None and nodes:
        gpus = total // nodes
    per_task = _gpus(options.get("gpus-per-task"))
    if tasks is None and all_tasks is not None and nodes:
        tasks = all_tasks // nodes
    if gpus is None and per_task is not None and tasks:
        gpus = per_task * tasks
    if script.is_batch and tasks is None and all_tasks is None:
        tasks = 1  # a task a node is Slurm's default
    context = replace(context, gpu=_gpu_of(options) or context.gpu)
    return Scene(
        nodes=nodes if nodes is not None else context.nodes,
        gpus_per_node=gpus if gpus is not None else context.gpus_per_node,
        tasks_per_node=tasks,
        cpus_per_task=_count(options.get("cpus-per-task")),
        scheduler="slurm" if script.is_batch else None,
        context=context,
    )


def _gpu_of(options: dict[str, Option]) -> str | None:
    """The kind of GPU that #SBATCH lines ask for: `--gres=gpu:v100:4`, `--constraint=a100`."""
    for name in ("gres", "gpus-per-node", "gpus", "constraint"):
        value = options[name].value if name in options else "|"
        if "|" not in value and (gpu := gpu_in(value)) is not None:
            return gpu
    return None


def _count(option: Option | None) -> int | None:
    return whole(option.value) if option is not None else None


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

    def option(*names: str) -> int | None:
        word = launch.option(*names)
        return scene.number(word.text) if word is not None else None

    if launch.program == "torchrun":
        told = scene.scheduler == "kubernetes"  # the operator sets PET_NNODES and the like
        nodes = option("nnodes") if "nnodes" in launch.options else scene.nodes if told else 1
        per_node = option("nproc_per_node")
        if "nproc_per_node" not in launch.options:
            per_node = (scene.tasks_per_node or scene.gpus_per_node) if told else 1
        elif launch.options["nproc_per_node"].text in {"gpu", "auto"}:
            per_node = scene.gpus_per_node
    elif launch.program == "accelerate":
        world = option("num_processes")
        nodes = option("num_machines") if "num_machines" in launch.options else None
        if nodes is None and world is not None and "config_file" not in launch.options:
            nodes = 1
        per_node = world // nodes if world is not None and nodes else None
        return Started(nodes, per_node, world)
    elif launch.program == "deepspeed":
        many = launch.option("hostfile", "H", "num_nodes", "include", "i") is not None
        nodes = option("num_nodes") or (None if many else 1)
        per_node = option("num_gpus", "num_accelerators") or scene.gpus_per_node
    elif launch.program == "python" and "srun" in launch.wrappers:
        nodes = scene.nodes
        tasks = launch.wrapper("srun", "ntasks", "n")
        each = launch.wrapper("srun", "ntasks-per-node")
        per_node = scene.number(each.text) if each is not None else scene.tasks_per_node
        if tasks is not None:
            world = scene.number(tasks.text)
            return Started(nodes, None if world is None or not nodes else world // nodes, world)
    elif launch.wrapper("mpirun", "np", "n") is not None:
        tasks = launch.wrapper("mpirun", "np", "n")
        return Started(None, None, scene.number(tasks.text) if tasks is not None else None)
    else:
        nodes, per_node = scene.nodes, None
    world = nodes * per_node if nodes is not None and per_node is not None else None
    return Started(nodes, per_node, world)

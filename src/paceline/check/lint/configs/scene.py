"""What is known of the job that a launch line belongs to (nodes, GPUs, processes on each), and what
a launch line does wrong in it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from paceline.check.lint.configs.degrees import check_megatron
from paceline.check.lint.configs.launch_line import Launch, launches_in, whole
from paceline.check.lint.configs.say import Fault
from paceline.check.lint.configs.shell import Script, Word
from paceline.check.lint.configs.variables import check_port, check_variables
from paceline.check.lint.context import Context


def _number(text: str, job: Context) -> int | None:
    """The number a text stands for, Slurm's variables read from the #SBATCH lines."""
    product = re.fullmatch(r"\$\(\((.+)\)\)", text.strip())
    if product is not None:
        names = (re.sub(r"^(?![\d$])", "$", part.strip()) for part in product[1].split("*"))
        numbers = [_number(name, job) for name in names]
        return None if None in numbers else prod(one for one in numbers if one is not None)
    name = re.fullmatch(r"\$\{?SLURM_(\w+)\}?", text.strip())
    if name is None:
        return whole(text)
    tasks = (job.devices or 0) * (job.nodes or 0) or None
    return {
        "NNODES": job.nodes,
        "JOB_NUM_NODES": job.nodes,
        "GPUS_ON_NODE": job.gpus_per_node,
        "GPUS_PER_NODE": job.gpus_per_node,
        "NTASKS_PER_NODE": job.devices,
        "NTASKS": tasks,
        "NPROCS": tasks,
    }.get(name[1])


def job_of(script: Script, context: Context) -> Context:
    """What is known of the job of a shell script: its #SBATCH lines first, then the context. Its
    `devices` are the tasks of a node."""
    options = {name: whole(text) for name, text in script.sbatch.items()}
    nodes, tasks, all_tasks = map(options.get, ("nodes", "ntasks-per-node", "ntasks"))
    gpus = _gpus(script, "gpus-per-node") or _gpus(script, "gres")
    total, per_task = _gpus(script, "gpus"), _gpus(script, "gpus-per-task")
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
    return replace(
        context,
        nodes=nodes if nodes is not None else context.nodes,
        gpus_per_node=gpus if gpus is not None else context.gpus_per_node,
        devices=tasks,
    )


def _gpus(script: Script, name: str) -> int | None:
    """`8`, `a100:8`, `gpu:8`, `gpu:a100:8(S:0-1)`."""
    text = script.sbatch.get(name, "").split("(")[0]
    if "gpu" in text:
        text = next((part for part in text.split(",") if part.startswith("gpu")), text)
    last = text.rsplit(":", 1)[-1]
    return int(last) if last.isdigit() else None


def started(launch: Launch, job: Context) -> Context:
    """Nodes, processes on each, and all of them, as the launch line says; nothing else.

    A word that is a variable, whose text is not known, may hold the launcher's options.
    """
    if launch.target is not None and launch.target.text.startswith("$"):
        return Context()

    def number(word: Word | None) -> int | None:
        return _number(word.text, job) if word is not None else None

    def option(*names: str) -> int | None:
        return number(launch.option(*names))

    nodes: int | None = None
    per_node: int | None = None
    world: int | None = None
    if launch.program == "torchrun":
        told, each = launch.is_told, launch.option("nproc_per_node")
        nodes = option("nnodes") if "nnodes" in launch.options else job.nodes if told else 1
        per_node = number(each)
        if each is None:
            per_node = (job.devices or job.gpus_per_node) if told else 1
        elif each.text in {"gpu", "auto"}:
            per_node = job.gpus_per_node
    elif launch.program == "accelerate":
        world, nodes = option("num_processes"), option("num_machines")
        if world is not None and not {"num_machines", "config_file"} & set(launch.options):
            nodes = 1
    elif launch.program == "deepspeed":
        many = launch.option("hostfile", "H", "num_nodes", "include", "i") is not None
        nodes = option("num_nodes") or (None if many else 1)
        per_node = option("num_gpus", "num_accelerators") or job.gpus_per_node
    elif launch.program == "python" and "srun" in launch.wrappers:
        nodes, world = job.nodes, number(launch.wrapper("srun", "ntasks", "n"))
        each = launch.wrapper("srun", "ntasks_per_node")
        if launch.wrapper("srun", "ntasks", "n") is None:
            per_node = number(each) if each is not None else job.devices
    elif (tasks := launch.wrapper("mpirun", "np", "n")) is not None:
        world = number(tasks)
    else:
        nodes = job.nodes
    if world is not None and nodes:
        per_node = world // nodes
    elif nodes is not None and per_node is not None:
        world = nodes * per_node
    return Context(nodes=nodes, devices=per_node, world_size=world)


def check_script(script: Script, context: Context) -> Iterator[Fault]:
    """Everything a shell script shows: its variables, its launches, and the two together."""
    launches, job = launches_in(script), job_of(script, context)
    said = {started(one, job).nodes for one in launches if one.program != "python"}
    if job.nodes is None and len(said) == 1 and not script.is_batch:
        job = replace(job, nodes=said.pop())
    inline = [each for command in script.commands for each in command.environment]
    yield from check_variables([*script.variables, *inline], job)
    for launch in launches:
        yield from check_launch(launch, job, context)


def check_launch(launch: Launch, job: Context, context: Context) -> Iterator[Fault]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    port = launch.option("master_port", "main_process_port")
    if port is not None and (number := whole(port.text)) is not None:
        yield from check_port(port, "the port", number)
    yield from check_megatron(launch, started(launch, job).world_size or context.num_processes)

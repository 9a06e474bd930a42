"""A batch script of Slurm: its #SBATCH lines against what its launch lines need."""

import re
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.launch_rules import TRAINS
from paceline.check.lint.configs.say import WARNING, found
from paceline.check.lint.configs.scene import Scene
from paceline.check.lint.configs.shell import Script

_LIGHTNING = re.compile(
    r"(?im)\b(pl|L|lightning|pytorch_lightning)\.Trainer\(|\bTrainer\([^)]*num_nodes|trainer\.devices"
)


def check_slurm(script: Script, launches: Sequence[Launch], scene: Scene) -> Iterator[Finding]:
    """What the batch script asks for, and what it then starts."""
    trains = [each for each in launches if _trains(each)]
    for launch in trains:
        yield from _check_tasks(script, launch, scene)
        yield from _check_without_srun(script, launch, scene)
        yield from _check_ports(launch, scene)


def _trains(launch: Launch) -> bool:
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        return True
    target = launch.target.text if launch.target is not None else ""
    return launch.program == "python" and ("srun" in launch.wrappers or bool(TRAINS.search(target)))


def _place(script: Script, *names: str) -> int | None:
    return next((script.sbatch[name].line for name in names if name in script.sbatch), None)


def _is_lightning(script: Script, launch: Launch, scene: Scene) -> bool:
    if scene.context.launcher in {"lightning", "fabric"}:
        return True
    if _LIGHTNING.search(script.text):
        return True
    devices = launch.argument("devices", "gpus", "n_devices")
    nodes = launch.argument("num_nodes")
    return devices is not None and nodes is not None


def _check_tasks(script: Script, launch: Launch, scene: Scene) -> Iterator[Finding]:
    """How many copies of the command Slurm starts on a node, against who starts the ranks."""
    own = launch.wrapper("srun", "ntasks-per-node") or launch.wrapper("srun", "ntasks", "n")
    if "srun" not in launch.wrappers or scene.tasks_per_node is None:
        return
    tasks = scene.tasks_per_node
    place = _place(script, "ntasks-per-node", "ntasks") or launch.line
    if own is not None:
        number = scene.number(own.text)
        if number is None:
            return
        total = launch.wrapper("srun", "ntasks-per-node") is None
        tasks = number // scene.nodes if total and scene.nodes else number
        place = own.line
    if launch.program in {"torchrun", "accelerate"}:
        started_by_one = launch.option("nproc_per_node", "num_processes")
        if tasks > 1 and started_by_one is not None and whole(started_by_one.text) != 1:
            what = (
                f"{tasks} tasks a node each start {launch.program}, which starts all ranks of the "
                "node itself"
            )
            fix = "--ntasks-per-node=1: one launcher a node"
            yield found("slurm-ntasks-mismatch", script.path, place, what, fix)
        return
    if launch.program != "python":
        return
    yield from _check_trainer(script, launch, scene, tasks, place)


def _check_trainer(
    script: Script, launch: Launch, scene: Scene, tasks: int, place: int
) -> Iterator[Finding]:
    """A trainer that wants one task for each device, as Lightning does."""
    lightning = _is_lightning(script, launch, scene)
    word = launch.argument("devices", "gpus", "n_devices")
    devices = whole(word.text) if word is not None else None
    if lightning and devices is None:
        devices = scene.context.devices
    gpus = scene.gpus_per_node
    wanted = devices if devices is not None else gpus
    if lightning and wanted is not None and wanted > 1 and tasks != wanted:
        what = (
            f"{tasks} task{'s' if tasks > 1 else ''} a node, and the trainer wants one for each of "
            f"{wanted} devices"
        )
        fix = f"#SBATCH --ntasks-per-node={wanted}"
        yield found("slurm-ntasks-mismatch", script.path, place, what, fix)
    nodes_word = launch.argument("num_nodes", "nnodes")
    nodes = whole(nodes_word.text) if nodes_word is not None else None
    if nodes is None and lightning and scene.context.nodes != scene.nodes:
        nodes = scene.context.nodes
    if nodes is not None and scene.nodes is not None and nodes != scene.nodes:
        line = _place(script, "nodes") or (nodes_word.line if nodes_word else launch.line)
        what = f"the trainer waits for {nodes} nodes, and the job has {scene.nodes}"
        fix = f"num_nodes={scene.nodes}, or #SBATCH --nodes={nodes}"
        yield found(
            "slurm-ntasks-mismatch",
            script.path,
            nodes_word.line if nodes_word is not None else line,
            what,
            fix,
        )


_BEFORE_TRAINING = re.compile(r"(?i)(prep|download|tokeni[sz]e|convert|eval|test|plot|split|build)")
"""Names of scripts that one process is enough for."""


def _check_without_srun(script: Script, launch: Launch, scene: Scene) -> Iterator[Finding]:
    """A launch that only the first of several nodes ever sees."""
    if scene.nodes is None or scene.nodes < 2:
        return
    carriers = {"srun", "mpirun", "mpiexec", "ssh", "pdsh", "jsrun"}
    if carriers & set(launch.wrappers) or launch.program in {"deepspeed", "horovod", "mlx", "ray"}:
        return
    if launch.program == "accelerate" and {"config_file", "use_deepspeed"} & set(launch.options):
        return  # DeepSpeed's launcher may log in to the other nodes
    target = launch.target.text if launch.target is not None else ""
    if launch.program == "python" and (
        _BEFORE_TRAINING.search(target) or re.search(r"(?m)^\s*srun\b", script.text)
    ):
        return
    if re.search(r"\b(ssh|pdsh|clush|mpirun|mpiexec|ray start)\b", script.text):
        return
    if re.search(r"\bsrun\b[^\n]*(\$0|\.sh\b|\$\{?\w*(SCRIPT|LAUNCH)\w*)", script.text):
        return
    if any(word.text == "srun" for command in script.commands for word in command.words[:1]) and (
        any(each.in_function for each in script.commands)
    ):
        return
    what = f"without srun this runs on the first of {scene.nodes} nodes, and waits for the others"
    fix = f"srun {launch.words[0].text} ..."
    yield found("slurm-ntasks-mismatch", script.path, launch.line, what, fix)


def _check_ports(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """One port for all tasks of an array, which may share a node."""
    array = scene.sbatch.get("array")
    if (
        array is None
        or array.value.endswith("%1")
        or "exclusive" in scene.sbatch
        or "standalone" in launch.options
    ):
        return
    word = launch.option("master_port", "main_process_port", "rdzv_endpoint")
    said = launch.environment.get("MASTER_PORT")
    text = word.text.rpartition(":")[2] if word is not None else said.value if said else None
    if text is not None and re.fullmatch(r"[1-9]\d*", text):
        held = word is None or "$" in word.source
        line = said.line if said is not None and held else word.line if word else launch.line
        what = f"every task of the array takes port {text}, and several may share a node"
        fix = "$((20000 + SLURM_JOB_ID % 12768)), or --standalone on one node"
        yield found("port-in-use", launch.path, line, what, fix, level=WARNING)

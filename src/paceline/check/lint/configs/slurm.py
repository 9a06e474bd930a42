"""A batch script of Slurm: its #SBATCH lines against what its launch lines need."""

import re
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.launch_rules import TRAINS
from paceline.check.lint.configs.say import found
from paceline.check.lint.configs.scene import Scene
from paceline.check.lint.configs.shell import Script


def check_slurm(script: Script, launches: Sequence[Launch], scene: Scene) -> Iterator[Finding]:
    """What the batch script asks for, and what it then starts."""
    trains = [each for each in launches if _trains(each)]
    for launch in trains:
        yield from _check_tasks(script, launch, scene)
        yield from _check_without_srun(script, launch, scene)


def _trains(launch: Launch) -> bool:
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        return True
    target = launch.target.text if launch.target is not None else ""
    return launch.program == "python" and ("srun" in launch.wrappers or bool(TRAINS.search(target)))


def _place(script: Script, *names: str) -> int | None:
    return next((script.sbatch[name].line for name in names if name in script.sbatch), None)


def _check_tasks(script: Script, launch: Launch, scene: Scene) -> Iterator[Finding]:
    """How many copies of the command Slurm starts on a node, against who starts the ranks."""
    own = launch.wrapper("srun", "ntasks-per-node") or launch.wrapper("srun", "ntasks", "n")
    starts_all = launch.program in {"torchrun", "accelerate"}
    if "srun" not in launch.wrappers or scene.tasks_per_node is None or not starts_all:
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
    ranks = launch.option("nproc_per_node", "num_processes")
    if tasks > 1 and ranks is not None and whole(ranks.text) != 1:
        what = (
            f"{tasks} tasks a node each start {launch.program}, which starts all ranks of the "
            "node itself"
        )
        fix = "--ntasks-per-node=1: one launcher a node"
        yield found("slurm-ntasks-mismatch", script.path, place, what, fix)


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

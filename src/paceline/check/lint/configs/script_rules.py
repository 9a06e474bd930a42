"""Findings of a shell script: its variables, its launches, and the two together."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, launches_in, whole
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.say import found
from paceline.check.lint.configs.scene import Scene, scene_of, started
from paceline.check.lint.configs.shell import Script
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context


def check_script(script: Script, context: Context) -> Iterator[Finding]:
    """Everything a shell script shows."""
    launches = launches_in(script)
    scene = scene_for(script, launches, context)
    inline = [each for command in script.commands for each in command.environment]
    yield from check_variables([*script.variables, *inline], scene.known)
    for launch in launches:
        yield from check_launch(launch, scene)
        if script.is_batch:
            yield from check_tasks(script, launch, scene)


def scene_for(script: Script, launches: list[Launch], context: Context) -> Scene:
    """The scene of a script; where it is not a batch script, its own launch line says more."""
    scene = scene_of(script, context)
    said = {started(one, scene).nodes for one in launches if one.program != "python"}
    if scene.nodes is None and len(said) == 1 and not script.is_batch:
        return replace(scene, nodes=said.pop())
    return scene


def check_tasks(script: Script, launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Several tasks on a node, each of which starts all of the node's ranks."""
    starts_all = launch.program in {"torchrun", "accelerate"}
    if "srun" not in launch.wrappers or scene.tasks_per_node is None or not starts_all:
        return
    each, total = launch.wrapper("srun", "ntasks-per-node"), launch.wrapper("srun", "ntasks", "n")
    asked = [script.sbatch[name] for name in ("ntasks-per-node", "ntasks") if name in script.sbatch]
    tasks: int | None = scene.tasks_per_node
    line = asked[0].line if asked else launch.line
    if (own := each or total) is not None:
        tasks, line = scene.number(own.text), own.line
        if tasks is not None and each is None and scene.nodes:
            tasks //= scene.nodes
    ranks = launch.option("nproc_per_node", "num_processes")
    if tasks is not None and tasks > 1 and ranks is not None and whole(ranks.text) != 1:
        what = (
            f"{tasks} tasks a node each start {launch.program}, which starts all ranks of the "
            "node itself"
        )
        fix = "--ntasks-per-node=1: one launcher a node"
        yield found("slurm-ntasks-mismatch", script.path, line, what, fix)

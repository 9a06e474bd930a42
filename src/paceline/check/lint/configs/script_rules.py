"""Findings of a shell script: its variables, its launches, and the two together."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, launches_in
from paceline.check.lint.configs.launch_rules import check_launch
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


def scene_for(script: Script, launches: list[Launch], context: Context) -> Scene:
    """The scene of a script; where it is not a batch script, its own launch line says more."""
    scene = scene_of(script, context)
    said = {started(one, scene).nodes for one in launches if one.program != "python"}
    if scene.nodes is None and len(said) == 1 and not script.is_batch:
        return replace(scene, nodes=said.pop())
    return scene

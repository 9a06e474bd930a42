"""Findings of a shell script: its variables, its launches, and the two together."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, launches_in
from paceline.check.lint.configs.launch_meeting import check_neighbours, is_elsewhere, port_of
from paceline.check.lint.configs.launch_rules import (
    FEW_FILES,
    check_docker,
    check_launch,
    few_files,
)
from paceline.check.lint.configs.say import ERROR, found
from paceline.check.lint.configs.scene import Scene, scene_of, started
from paceline.check.lint.configs.shell import Script
from paceline.check.lint.configs.slurm import check_slurm
from paceline.check.lint.configs.small_kinds import check_tf_variables
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context


def check_script(script: Script, context: Context) -> Iterator[Finding]:
    """Everything a shell script shows."""
    launches = launches_in(script)
    scene = scene_for(script, launches, context)
    inline = [each for command in script.commands for each in command.environment]
    yield from check_variables([*script.variables, *inline], scene.surroundings)
    yield from check_tf_variables([*script.variables, *inline])
    for launch in launches:
        yield from check_launch(launch, scene)
    waits = [
        each.line
        for each in script.commands
        if each.words[:1] and (each.words[0].text in {"wait", "kill", "pkill", "killall"})
    ]
    yield from check_neighbours(launches, waits, script.text)
    yield from _check_called_again(script, launches)
    if script.is_batch:
        yield from check_slurm(script, launches, scene)
    yield from _check_docker_lines(script, launches)
    if launches:
        yield from _check_limits(script)


def _check_limits(script: Script) -> Iterator[Finding]:
    """`ulimit -n 1024` before a launch, whose processes inherit it."""
    for command in script.commands:
        words = [word.text for word in command.words]
        if words[:1] != ["ulimit"] or not words[-1].isdigit() or "-n" not in " ".join(words[1:]):
            continue
        if int(words[-1]) <= FEW_FILES:
            yield few_files(script.path, command.line, words[-1], "ulimit -n 65536")


def _check_called_again(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """A function that starts a launch on one port, called again while the first still runs."""
    for launch in launches:
        name, (port, word) = launch.function, port_of(launch)
        if name is None or port is None or not port.isdigit() or is_elsewhere(launch):
            continue
        if launch.program not in {"torchrun", "accelerate", "deepspeed"}:
            continue
        ends = [
            one
            for one in script.commands
            if one.words[:1] and one.words[0].text in {"wait", "kill", "pkill", "killall"}
        ]
        calls = [
            one
            for one in script.commands
            if one.words[:1] and one.words[0].text == name and one.function != name
        ]
        waits_itself = any(one.function == name and one.line >= launch.line for one in ends)
        for first, second in pairwise(calls):
            stays = first.background or (launch.background and not waits_itself)
            between = any(first.line <= one.line <= second.line for one in ends)
            if not stays or between or first.condition or second.condition:
                continue
            yield found(
                "port-in-use",
                ERROR,
                script.path,
                word.line if word is not None else launch.line,
                f"{name} is called again in line {second.line} while what line {first.line} "
                f"started runs, and both want port {port}",
                fix="give each its own port, as one more argument, or --standalone",
                evidence=[
                    (script.path, one.line, " ".join(each.text for each in one.words)[:120])
                    for one in (first, second)
                ],
            )
            break


def scene_for(script: Script, launches: list[Launch], context: Context) -> Scene:
    """The scene of a script; where it is not a batch script, its own launch line says more."""
    scene = scene_of(script, context)
    said = {started(one, scene).nodes for one in launches if one.program != "python"}
    if scene.nodes is None and len(said) == 1 and not script.is_batch:
        return replace(scene, nodes=said.pop())
    return scene


def _check_docker_lines(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """`docker run` of an image whose own command trains."""
    seen = {launch.line for launch in launches if "docker" in launch.wrappers}
    for command in script.commands:
        words = command.words
        if not words or words[0].text not in {"docker", "podman"} or command.line in seen:
            continue
        text = " ".join(word.text for word in words)
        trains = re.search(r"train|finetune|torchrun|ddp|nccl", text) is not None
        yield from check_docker(script.path, command.line, words[1:], trains=trains)

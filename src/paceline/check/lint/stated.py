"""What somebody says of a run: a mapping of facts, and the launch line."""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.check.lint.configs.launch_line import read_launch
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.configs.shell import Command, Word
from paceline.check.lint.context import Context, merged
from paceline.check.lint.gpus import knows_gpu

OTHER_NAMES = {
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "num_machines": "nodes",
    "nproc_per_node": "devices",
    "gpus": "devices",
    "num_processes": "world_size",
    "accelerator": "gpu",
}
"""What other tools call a fact of ours."""

NUMBERS = {"nodes", "gpus_per_node", "devices", "world_size"}


def context_from_facts(facts: Mapping[str, Any]) -> Context:
    """The context that a mapping of facts describes; what its launch line says is read too.

    Keys that mean nothing here are passed over: a context is often written for several tools.

    >>> context_from_facts({"launch": "torchrun --nnodes=2 --nproc-per-node=8"}).num_processes
    16
    """
    known = {one.name for one in fields(Context)}
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = OTHER_NAMES.get(key, key)
        if name not in known or value is None:
            continue
        if name in NUMBERS:
            number = _number(str(value))
            if number:
                found[name] = number
        elif name == "gpu":
            if knows_gpu(str(value)):
                found[name] = str(value)
        elif name == "versions":
            if isinstance(value, Mapping):
                found[name] = {str(package): str(text) for package, text in value.items()}
        else:
            found[name] = str(value)
    context = Context(**found)
    if context.launch is None:
        return context
    return merged(context, context_from_launch(context.launch))


def unread_facts(facts: Mapping[str, Any]) -> list[str]:
    """What of a mapping of facts `context_from_facts` takes nothing from, in words."""
    known = {one.name for one in fields(Context)} | set(OTHER_NAMES)
    said = []
    for key, value in facts.items():
        name = OTHER_NAMES.get(key, key)
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            said.append(f"no fact is called {key}" + (f" ({near[0]}?)" if near else ""))
        elif value is None:
            continue
        elif name in NUMBERS and not _number(str(value)):
            said.append(f"{key} is {value}, and has to be a whole number from 1 on")
        elif name == "versions" and not isinstance(value, Mapping):
            said.append(f'{key} is {value}, and has to be {{"torch": "2.6.0"}}')
        elif name == "gpu" and not knows_gpu(str(value)):
            said.append(f"no accelerator is called {value}")
    return said


def context_from_launch(line: str) -> Context:
    """What a launch line says of nodes and processes. What it leaves to variables is None.

    >>> context_from_launch("torchrun --nnodes 2 --nproc-per-node=8 train.py").nodes
    2
    """
    try:
        words = shlex.split(line, comments=False)
    except ValueError:
        words = line.split()
    command = Command(words=tuple(Word(each, 1) for each in words), line=1)
    launch = read_launch("", command, {})
    if launch is None:
        return Context(launch=line.strip())
    how = started(launch, Scene())
    return Context(nodes=how.nodes, devices=how.per_node, world_size=how.world, launch=line.strip())


def _number(text: str) -> int | None:
    """A whole number; a range `1:4` or a variable says nothing sure."""
    return int(text) if re.fullmatch(r"\d+", text.strip()) else None

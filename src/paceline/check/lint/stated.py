"""What somebody says of a run: a mapping of facts, and the launch line."""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from paceline.catalog import accelerator_spellings, load_accelerators
from paceline.catalog.generation import generation_of
from paceline.check.lint.configs.launch_line import read_launch
from paceline.check.lint.configs.scene import started
from paceline.check.lint.configs.shell import Command, Word
from paceline.check.lint.context import Context, merged

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
    taken = ((OTHER_NAMES.get(key, key), _taken(key, value)[0]) for key, value in facts.items())
    context = Context(**{name: value for name, value in taken if value is not None})
    return merged(context, context_from_launch(context.launch)) if context.launch else context


def unread_facts(facts: Mapping[str, Any]) -> list[str]:
    """What of a mapping of facts `context_from_facts` takes nothing from, in words."""
    return [why for key, value in facts.items() if (why := _taken(key, value)[1])]


def _taken(key: str, value: Any) -> tuple[Any, str]:
    """What a fact is taken as, or None; and why nothing is taken from it."""
    name, known = OTHER_NAMES.get(key, key), {one.name for one in fields(Context)}
    if name not in known:
        near = difflib.get_close_matches(key, known | set(OTHER_NAMES), n=1)
        return None, f"no fact is called {key}" + (f" ({near[0]}?)" if near else "")
    if value is None:
        return None, ""
    text = str(value).strip()
    if name in NUMBERS:
        number = int(text) if re.fullmatch(r"\d+", text) else 0
        why = f"{key} is {value}, and has to be a whole number from 1 on"
        return (number, "") if number else (None, why)
    if name == "versions":
        if isinstance(value, Mapping):
            return {str(package): str(each) for package, each in value.items()}, ""
        return None, f'{key} is {value}, and has to be {{"torch": "2.6.0"}}'
    if name == "gpu" and not knows_gpu(text):
        return None, f"no accelerator is called {value}"
    return str(value), ""


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
    launch = read_launch("", command)
    how = started(launch, Context()) if launch is not None else Context()
    return replace(how, launch=line.strip())


def knows_gpu(name: str) -> bool:
    """Whether a name is of the catalogue, or of a generation that is known.

    >>> knows_gpu("A100-SXM4-80GB"), knows_gpu("nonsense")
    (True, False)
    """
    spelled = {one.lower() for one in known_gpus()}
    return name.strip().lower() in spelled or generation_of(name) is not None


def known_gpus() -> tuple[str, ...]:
    """Every spelling of the catalogue, for a message that names the nearest ones."""
    return tuple(accelerator_spellings(load_accelerators()))

"""What is known of where the programs run: accelerator, nodes, launch line, versions.

Every field is None while it is unknown, and a rule that needs an unknown fact says nothing. The
facts come from `paceline lint --gpu V100 --nodes 2`, from `context_from_facts`, and from what a
launch line says (`context_from_launch`).
"""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.check.lint.gpus import knows_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about the run that the linted files need not contain. None is unknown."""

    gpu: str | None = None
    """Accelerator as its owner writes it: `V100`, `H100-SXM`."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    devices: int | None = None
    """Processes on each node, one for each device in use (`--nproc-per-node`, `devices=`)."""

    world_size: int | None = None
    launcher: str | None = None
    """`torchrun`, `accelerate`, `deepspeed`, `lightning`, `mlx`, `srun`, `mpirun`, `python`."""

    launch: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, as `{"torch": "2.6.0"}`."""

    @property
    def num_processes(self) -> int | None:
        """Processes of the job: as given, or nodes times devices."""
        if self.world_size is not None:
            return self.world_size
        per_node = self.devices if self.devices is not None else self.gpus_per_node
        if per_node is None or self.nodes is None:
            return None
        return per_node * self.nodes

    def version(self, package: str) -> tuple[int, ...] | None:
        """Numbers of a package's version, `(2, 6, 0)`; None when it is not known."""
        text = self.versions.get(package)
        numbers = re.match(r"(\d+(?:\.\d+)*)", text) if text else None
        return tuple(int(part) for part in numbers[1].split(".")) if numbers else None


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
    return with_launch(Context(**found))


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


def with_launch(context: Context) -> Context:
    """The context, its unknown fields filled from its own launch line."""
    if context.launch is None:
        return context
    said = context_from_launch(context.launch)
    return merged(context, said)


def merged(first: Context, second: Context) -> Context:
    """`first`, and what only `second` knows."""
    missing = {
        one.name: getattr(second, one.name)
        for one in fields(Context)
        if getattr(first, one.name) is None and getattr(second, one.name) is not None
    }
    versions = {**second.versions, **first.versions}
    return replace(first, **missing, versions=versions)


def context_from_launch(line: str) -> Context:
    """What a launch line says of nodes and processes. What it leaves to variables is None.

    >>> context_from_launch("torchrun --nnodes 2 --nproc-per-node=8 train.py").nodes
    2
    """
    try:
        words = shlex.split(line, comments=False)
    except ValueError:
        words = line.split()
    launcher = _launcher(words)
    nodes = _option(words, "nnodes", "num_machines", "num_nodes", "nodes", "N")
    devices = _option(words, "nproc_per_node", "ntasks_per_node", "num_gpus", "gpus_per_node")
    world = None
    if launcher == "accelerate":
        world = _option(words, "num_processes")
    elif launcher == "mlx":
        devices = None
        hosts = re.search(r"\((\d+) hosts\)", line)
        world = int(hosts[1]) if hosts else _option(words, "n", "np")
    elif launcher == "mpirun":
        world = _option(words, "np", "n")
    elif launcher == "srun":
        world = _option(words, "ntasks", "n")
    elif launcher == "torchrun" and nodes is None:
        nodes = 1 if not _has(words, "nnodes") else None
    if launcher == "deepspeed" and nodes is None and not _has(words, "hostfile", "H"):
        nodes = 1
    return Context(
        launcher=launcher, nodes=nodes, devices=devices, world_size=world, launch=line.strip()
    )


LAUNCH_LINE = re.compile(
    r"(?:^|[\s`$])((?:srun\s+(?:-\S+\s+)*)?"
    r"(?:torchrun|python3?\s+-m\s+torch\.distributed\.(?:launch|run)|accelerate\s+launch|deepspeed|"
    r"mlx\.launch|mpirun|mpiexec|horovodrun)\s+-[^`\n]*)"
)


def launch_in_text(text: str) -> str | None:
    """The launch line that a comment or docstring gives, `torchrun --nproc-per-node=8 x.py`."""
    found = LAUNCH_LINE.search(text)
    return found[1].strip() if found else None


def _launcher(words: list[str]) -> str | None:
    text = " ".join(words)
    for name, pattern in (
        ("torchrun", r"\btorchrun\b|torch\.distributed\.(launch|run)\b"),
        ("accelerate", r"\baccelerate\s+launch\b"),
        ("deepspeed", r"(^|\s|/)deepspeed\s"),
        ("mlx", r"\bmlx\.launch\b"),
        ("mpirun", r"\b(mpirun|mpiexec)\b"),
        ("srun", r"\bsrun\b"),
        ("python", r"(^|/|\s)python3?\s"),
    ):
        if re.search(pattern, text + " "):
            return name
    return None


def _has(words: list[str], *names: str) -> bool:
    return any(_named(word, names) for word in words)


def _named(word: str, names: tuple[str, ...]) -> bool:
    return word.startswith("-") and word.lstrip("-").split("=")[0].replace("-", "_") in names


def _option(words: list[str], *names: str) -> int | None:
    for index, word in enumerate(words):
        if not _named(word, names):
            continue
        _, sign, value = word.partition("=")
        if not sign:
            value = words[index + 1] if index + 1 < len(words) else ""
        return _number(value)
    return None


def _number(text: str) -> int | None:
    """A whole number; a range `1:4` or a variable says nothing sure."""
    return int(text) if re.fullmatch(r"\d+", text.strip()) else None

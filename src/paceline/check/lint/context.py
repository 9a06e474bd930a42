"""What is known of where the programs run: accelerator, nodes, launch line, versions.

Every field is None while it is unknown, and a rule that needs an unknown fact says nothing. The
facts come from `paceline lint --gpu V100 --nodes 2`, and from `facts.py`: a mapping, a launch line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace


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
        return version_numbers(self.versions.get(package, "")) or None


def version_numbers(text: str) -> tuple[int, ...]:
    """`(2, 6, 0)` of "2.6.0+cpu"; nothing of what begins with no number."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def merged(first: Context, second: Context) -> Context:
    """`first`, and what only `second` knows."""
    missing = {
        one.name: getattr(second, one.name)
        for one in fields(Context)
        if getattr(first, one.name) is None and getattr(second, one.name) is not None
    }
    versions = {**second.versions, **first.versions}
    return replace(first, **missing, versions=versions)


LAUNCH_LINE = re.compile(
    r"(?:^|[\s`$])((?:srun\s+(?:-\S+\s+)*)?"
    r"(?:torchrun|python3?\s+-m\s+torch\.distributed\.(?:launch|run)|accelerate\s+launch|deepspeed|"
    r"mlx\.launch|mpirun|mpiexec|horovodrun)\s+-[^`\n]*)"
)


def launch_in_text(text: str) -> str | None:
    """The launch line that a comment or docstring gives, `torchrun --nproc-per-node=8 x.py`."""
    found = LAUNCH_LINE.search(text)
    return found[1].strip() if found else None

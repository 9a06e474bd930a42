"""The cards of a machine or of a job: their names in the catalog, their memory, and what keeps them
from being planned for."""

import re
from collections import Counter
from collections.abc import Sequence
from math import inf

from paceline.catalog import Accelerator, Catalog, accelerator_spellings
from paceline.errors import JobError, Problem
from paceline.job import ClusterSpec, Job
from paceline.topology.machine import Machine
from paceline.topology.read_nvidia import FoundGpu
from paceline.units import format_bytes


def memory_of_gpus(
    gpus: Sequence[FoundGpu], known: Accelerator | None, host_bytes: int
) -> int | None:
    """Memory of the smallest of a machine's GPUs of one kind: as reported; else its share of the
    host's, where they use that; else the catalog's, which a slice (MIG) has too. None where nobody
    says.

    Args:
        gpus: As their tool reports them.
        known: The catalog's row of them.
    """
    if not gpus:
        return None
    if any(gpu.is_mig for gpu in gpus):
        return known.memory_bytes if known is not None and known.slice_of is not None else None
    told = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    if len(told) == len(gpus):
        return min(told)
    if uses_host_memory(gpus[0].name, known):
        return host_bytes // len(gpus)
    return known.memory_bytes if known is not None else None


def uses_host_memory(name: str, known: Accelerator | None) -> bool:
    return known.shares_host_memory if known is not None else bool(_INTEGRATED.search(name))


_INTEGRATED = re.compile(r"\bnvgpu\b|\b(Thor|Orin|Xavier|Tegra)\b", re.I)
"""Names of GPUs on one chip with the CPU. Their driver is nvgpu: `Orin (nvgpu)` (Jetson Linux
developer guide)."""


def memory_problem(gpus: Sequence[FoundGpu], where: str) -> Problem:
    """The problem of GPUs whose memory nobody says."""
    name = gpus[0].name
    if any(gpu.is_mig for gpu in gpus):
        return Problem(
            code="T007",
            what=f"{name} is cut into slices (MIG), and which one a rank gets is not known",
            where=where,
            fix="name the slice, as nvidia-smi -L lists it: cluster.accelerator: H100-SXM 1g.10gb; "
            "or undo the slices: nvidia-smi -mig 0",
        )
    return Problem(
        code="T007",
        what=f"nvidia-smi does not report the memory of {name}, and the catalog lacks the card",
        where=where,
        fix="set cluster.memory to what one GPU has, such as 16 GiB: torch.cuda.mem_get_info()",
    )


def check_gpus_seen(machine: Machine, where: str, on_cpus: str) -> None:
    """Refuse to take CPUs on a machine whose GPUs cannot be seen.

    Args:
        where: The place that leaves the accelerator open.
        on_cpus: What to do there to have CPUs.

    Raises:
        JobError: `T006`, with the reason.
    """
    if machine.why_no_gpus is not None:
        raise JobError(unseen_gpus(machine.why_no_gpus, where, on_cpus))


def unseen_gpus(why: str, where: str, on_cpus: str) -> Problem:
    """The problem of GPUs that are here and cannot be seen."""
    return Problem(
        code="T006",
        what=f"this machine's GPUs cannot be used: {why}",
        where=where,
        fix="run `nvidia-smi -L`, which must list every GPU, and look at CUDA_VISIBLE_DEVICES; "
        f"to train on CPUs, {on_cpus}",
    )


def different_gpus(gpus: Sequence[FoundGpu], where: str) -> Problem | None:
    """The problem of a machine whose GPUs are not all of one kind; None where they are."""
    kinds = Counter(gpu.name for gpu in gpus)
    if len(kinds) < 2:
        return None
    listed = ", ".join(f"{count} {name}" for name, count in kinds.items())
    return Problem(
        code="T003",
        what=f"this machine has different GPUs: {listed}",
        where=where,
        fix="set CUDA_VISIBLE_DEVICES to the numbers of one kind",
    )


def check_one_kind(asked: str, catalog: Catalog, where: str) -> None:
    """Refuse `4x H100-SXM + 4x A100-80`, naming the one that would set the pace."""
    parts = [part for part in re.split(r"\s*[,+;/&]\s*|\s+and\s+", asked) if part]
    spellings = accelerator_spellings(catalog.accelerators)
    known = {spelling.lower(): name for spelling, name in spellings.items()}
    bare = [re.sub(r"^\d+\s*[x*]?\s*(?=[A-Za-z])", "", part).strip().lower() for part in parts]
    names = list(dict.fromkeys(known[name] for name in bare if name in known))
    if len(parts) < 2 or len(names) < 2:
        return
    kinds = [catalog.accelerators[name] for name in names]
    slowest = min(kinds, key=lambda each: max(each.peak_flops_per_s.values(), default=0.0))
    least = min(each.memory_bytes or 0 for each in kinds)
    network = min(each.network_node_bytes_per_s for each in kinds)
    is_slower = network < slowest.network_node_bytes_per_s
    narrowest = f", network to {network * 8e-9:g}Gb/s" if is_slower else ""
    raise JobError.of(
        code="T005",
        what=f"the nodes differ: {' and '.join(names)}; a plan is for equal ranks",
        where=where,
        fix=f"set accelerator to {slowest.name}{narrowest} and memory to {format_bytes(least)}: "
        "the slowest sets the pace and the smallest the room",
    )


def check_slices(known: Accelerator, spec: ClusterSpec, where: str) -> None:
    """Refuse several ranks on the slices (MIG) of one node.

    Sources: NVIDIA MIG user guide, device enumeration: a CUDA process enumerates one MIG device;
    and application considerations: no peer-to-peer between slices. NCCL's init.cc refuses two ranks
    on one card; from 2.32 on it has slices as an experiment, over host memory (NVIDIA/nccl#1716).

    Raises:
        JobError: `T025`.
    """
    if known.slice_of is None or spec.per_node in ("auto", 1):
        return
    raise JobError.of(
        code="T025",
        what=f"{spec.per_node} ranks on slices (MIG) of one node: a process sees one slice alone, "
        "and NCCL refuses two ranks on one card",
        where=where,
        fix=f"set per_node to 1 for one {known.name}, or undo the slices (nvidia-smi -mig 0) and "
        f"set accelerator to {known.slice_of}",
    )


_MOST_OF_MEMORY = 1.08
"""Declared memory for the catalog's that is still the same card: a GiB is 7.4 % more than a GB."""

_MOST_OF_HOST_LINKS = 2.0
"""Declared network of a node for all host links of its accelerators. A guess: beyond it a number or
a unit is wrong."""


_MOST_OF_A_NODE = 48 * 2**40
"""Bytes of memory of the largest single machine sold: HPE Superdome Flex, 48 TB (its
QuickSpecs)."""


def check_memory(job: Job) -> None:
    """Refuse more memory than any node has.

    Raises:
        JobError: `T026`.
    """
    for field in ("memory", "host_memory"):
        asked = getattr(job.spec.cluster, field)
        if asked != "auto" and asked > _MOST_OF_A_NODE:
            raise JobError.of(
                code="T026",
                what=f"cluster.{field} is {format_bytes(asked)}, and no single machine has more "
                f"than {format_bytes(_MOST_OF_A_NODE)}",
                where=job.where(f"cluster.{field}"),
                fix=f"leave cluster.{field} out, or write what one node has",
            )


def check_declared(known: Accelerator, job: Job, host_link_bytes_per_s: float | None) -> None:
    """Refuse numbers of the job that the accelerator it names cannot have. Less memory may be a
    part of the card, or a reserve.

    Args:
        known: The catalog's row, with the job's own file.
        job: As read: numbers that others put into it are not looked at.
        host_link_bytes_per_s: Of one accelerator.

    Raises:
        JobError: `T026`.
    """
    spec = job.spec.cluster
    fix = (
        "name the accelerator that you have (`paceline catalog`), or describe yours in "
        "paceline-catalog.toml"
    )
    memory = spec.memory if ("cluster", "memory") in job.lines else "auto"
    shares = known.shares_host_memory or known.memory_bytes is None
    if memory != "auto" and not shares and memory > _MOST_OF_MEMORY * (known.memory_bytes or 0):
        raise JobError.of(
            code="T026",
            what=f"cluster.memory is {format_bytes(memory)} for one accelerator, and {known.name} "
            f"has {format_bytes(known.memory_bytes or 0)}",
            where=job.where("cluster.memory"),
            fix=f"leave cluster.memory out, {fix}",
        )
    per_node = known.num_per_node if spec.per_node == "auto" else spec.per_node
    most = max(per_node, known.num_per_node) * (host_link_bytes_per_s or inf)
    if spec.network != "auto" and spec.network > _MOST_OF_HOST_LINKS * most:
        raise JobError.of(
            code="T026",
            what=f"cluster.network is {spec.network * 8e-9:,.0f} Gb/s a node, and the host links "
            f"of its {known.name} carry {most * 8e-9:,.0f} Gb/s together",
            where=job.where("cluster.network"),
            fix="write what the NICs of a node carry together, such as "
            f"{known.network_node_bytes_per_s * 8e-9:,.0f} Gb/s (usual); or {fix}",
        )

"""Whether a node's own memory, or its disks, hold what is kept off the accelerators, and its memory
the models that are built whole.

Leaves out: what else the host needs, such as its data loaders and a checkpoint's copy; and the
buffers through which the state travels.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.errors import Problem
from paceline.estimate import Case
from paceline.estimate.engine_memory import holdings_of
from paceline.estimate.memory import fullest_stages, memory_parts
from paceline.job import Job
from paceline.parallel import Layout, Layouts, table_of
from paceline.parallel.table import code_of
from paceline.profile import ModuleFacts
from paceline.topology import Cluster
from paceline.units import bytes_apart, counted, format_bytes

_FLOAT32_BYTES = 4

_DISK_BUFFERS = 5
"""Buffers in memory beside an optimizer on disk, each of `step_unit` of engines.toml in float32:
four of the swapper and the gradient that the optimizer reads. Source: DeepSpeed 0.19.8,
`buffer_count` of zero/offload_config.py, `initialize_optimizer_states` of zero/stage3.py."""

_NODE_BYTES, _NODE_DISK_BYTES, _NODE_RANKS = 2 * 2**40, int(8 * 3.84e12), 8
"""Memory and disks of a node of 8. Source: DGX H100 data sheet: 2 TB of memory, 8 x 3.84 TB of
NVMe. Assumed of every node that is not looked at, in proportion to its accelerators."""


def host_limit_bytes(cluster: Cluster, offload: str) -> int:
    """Bytes a node has for offloaded state: measured or declared, else assumed."""
    if offload == "cpu" and cluster.host_bytes is not None:
        return cluster.host_bytes
    whole = _NODE_DISK_BYTES if offload == "nvme" else _NODE_BYTES
    return whole * cluster.ranks_per_node // _NODE_RANKS


def host_limit_source(cluster: Cluster, offload: str) -> str:
    """How that is known."""
    if not is_host_assumed(cluster, offload):
        return cluster.known.get("host_bytes", "measured")
    each = f"{_NODE_DISK_BYTES / _NODE_RANKS / 1e12:.3g} TB"
    if offload == "cpu":
        each = format_bytes(_NODE_BYTES / _NODE_RANKS)
    return f"assumed: {each} for each accelerator"


def is_host_assumed(cluster: Cluster, offload: str) -> bool:
    """Whether a node's memory, or its disk, was neither measured nor declared."""
    return offload != "cpu" or cluster.host_bytes is None


def check_building(facts: ModuleFacts, job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Whether a node's memory holds the model as often as it has ranks, where every rank has to
    build it whole. Ranks that make their own parts need next to nothing beside them."""
    if facts.whole_because is None:
        return
    needed = facts.num_parameters * _FLOAT32_BYTES * cluster.ranks_per_node
    limit = host_limit_bytes(cluster, "cpu")
    if needed > limit:
        needs, has = bytes_apart(needed, limit)
        yield Problem(
            code="P004",
            what=f"every rank builds {job.spec.model.factory} whole in the host's memory, because "
            f"its factory {facts.whole_because}: {counted(cluster.ranks_per_node, 'rank')} of "
            f"a node need "
            f"{needs} and it has {has} "
            f"({host_limit_source(cluster, 'cpu')})",
            where=job.where("model.factory"),
            fix="let the factory make parameters and draw them with nn.init, without looking at "
            "their numbers; or set cluster.per_node lower",
        )


def host_bytes_of(layouts: Layouts, case: Case) -> Any:
    """Optimizer state and master copies that are off the accelerators, and parameters with the
    gradients of those that are trained where those are; and what `hosts_gradients` of engines.toml
    adds, but for what `memory_beside_disk` counts: bytes of all ranks of the fullest node, for each
    cell of a grid. A node is taken to hold ranks of one stage."""
    return _off_accelerators(layouts, case)[0]


def memory_beside_disk(layouts: Layouts, case: Case) -> Any:
    """Bytes of a node's memory that gradients and their buffers take while its ranks keep optimizer
    state on its disk, where `hosts_gradients` of engines.toml has the engine do so; 0 elsewhere."""
    return _off_accelerators(layouts, case)[1]


def _off_accelerators(layouts: Layouts, case: Case) -> tuple[Any, Any]:
    nowhere = np.zeros_like(np.asarray(layouts.offload))
    on_device = replace(layouts, offload=nowhere, offload_parameters=nowhere)
    holdings = holdings_of(
        case.engine,
        case.cluster,
        on_device,
        precision=case.precision,
        optimizer=case.optimizer,
        profile=case.profile,
    )
    is_disk = layouts.offload == code_of("offload", "nvme")
    beside: Any = 0.0
    """Bytes of a trained parameter, besides optimizer and master copy."""
    in_memory: Any = 0.0
    """Those of them that do not go to a disk with the rest."""
    hosts = holdings.ways.hosts_gradients
    if hosts:
        is_full = layouts.sharding == code_of("sharding", "full")
        added_up: Any = np.where(is_full, holdings.gradient_bytes, holdings.gathered_bytes)
        in_memory = np.where(is_disk, added_up, 0.0)
        sums = holdings.ways.hosts_sums * ~is_full * (layouts.accumulation > 1)
        beside = _FLOAT32_BYTES + added_up - in_memory + sums * holdings.gathered_bytes
    most: Any = 0.0
    stay: Any = 0.0
    for parts in memory_parts(case.model, on_device, holdings, fullest_stages(layouts)):
        trained = parts["optimizer"] / holdings.moment_bytes
        moved = parts["parameters"]
        if not hosts:
            is_adapted = case.profile.adapter is not None  # moments are of what is trained
            moved = moved + (trained * holdings.gradient_bytes if is_adapted else moved)
        moved = moved * (np.asarray(layouts.offload_parameters) > 0) + trained * beside
        most = np.maximum(most, parts["optimizer"] + parts["master copy"] + moved)
        buffers = _DISK_BUFFERS * _FLOAT32_BYTES * np.minimum(trained, holdings.step_unit)
        stay = np.maximum(stay, trained * in_memory + buffers)
    ranks = case.cluster.ranks_per_node
    found = np.where(layouts.offload == 0, 0.0, most * ranks)
    return found, np.where(is_disk & (hosts > 0), stay * ranks, 0.0)


def host_bytes_of_one(layout: Layout, case: Case) -> int:
    """Bytes that one layout keeps off the accelerators of the fullest node, as `host_bytes_of`
    counts them."""
    return round(float(np.max(host_bytes_of(table_of([layout]), case))))


def memory_beside_disk_of_one(layout: Layout, case: Case) -> int:
    """Host memory that one layout takes of the fullest node beside its disk."""
    return round(float(np.max(memory_beside_disk(table_of([layout]), case))))


def over_host_bytes(layouts: Layouts, case: Case) -> Any | None:
    """Bytes of a node where they are more than it has, on its disk or else in its memory; infinity
    elsewhere. None where no layout offloads anything."""
    if not np.any(layouts.offload):
        return None
    needed, beside = _off_accelerators(layouts, case)
    is_disk = layouts.offload == code_of("offload", "nvme")
    cluster = case.cluster
    memory = host_limit_bytes(cluster, "cpu")
    over = np.where(beside > memory, beside, np.inf)
    limit = np.where(is_disk, host_limit_bytes(cluster, "nvme"), memory)
    return np.where(needed > limit, needed, over)

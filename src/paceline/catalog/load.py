"""Read the catalog's TOML files into frozen dataclasses, once a process.

Leaves out: prices, links by generation, and a catalog file of the reader's own.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from paceline.errors import JobError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator. None is unknown, or for a CPU read from the machine."""

    name: str
    backend: Literal["nccl", "gloo"]
    """Library of the collectives."""

    memory_bytes: int | None
    """Memory of one accelerator as its own tool reports it."""

    peak_flops_per_s: Mapping[str, float]
    """Dense peak by precision (`fp32`, `bf16`). A precision it lacks is not there."""

    efficiency: Mapping[str, float]
    """Share of that peak reached over a training step's forward and backward pass."""

    memory_bytes_per_s: float | None
    """Peak bandwidth of its memory."""

    link_bytes_per_s: float
    """To the others in its node, each direction."""

    network_node_bytes_per_s: float
    """Usual network of a node, each direction."""

    num_per_node: int
    """Usual number in a node."""

    overhead_bytes: int
    """Taken by a process before its first tensor."""

    allocator_slack: float
    """What PyTorch's allocator holds unused, as a share of the tensors that are alive."""

    smi_names: tuple[str, ...]
    """How the device's own tool names it."""

    source: str
    """Where the numbers are from, and which are guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """Sizes of a published decoder, named as in `profile.DecoderShape`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool
    qkv_bias: bool
    rope_theta: float
    norm_eps: float
    source: str


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the catalog by its name."""
    return {name: _accelerator(name, row) for name, row in _read("accelerators.toml").items()}


@cache
def load_model_presets() -> Mapping[str, ModelPreset]:
    """Every published model of the catalog by its name."""
    return {name: ModelPreset(name=name, **row) for name, row in _read("models.toml").items()}


def find_accelerator(name: str, *, where: str) -> Accelerator:
    """The accelerator of that name.

    Raises:
        JobError: `T001`, naming the nearest one; `where` is its place in the job.
    """
    known = load_accelerators()
    if name in known:
        return known[name]
    raise JobError(_unknown("T001", "accelerator", name, known, where))


def find_model_preset(name: str, *, where: str) -> ModelPreset:
    """The published model of that name.

    Raises:
        JobError: `M001`, naming the nearest one; `where` is its place in the job.
    """
    known = load_model_presets()
    if name in known:
        return known[name]
    raise JobError(_unknown("M001", "model preset", name, known, where))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((files("paceline.catalog") / name).read_text(encoding="utf-8"))


def _accelerator(name: str, row: Mapping[str, Any]) -> Accelerator:
    kinds = ("fp32", "bf16")
    peaks = {kind: row.get(f"peak_{kind}_flops_per_s") for kind in kinds}
    shares = {kind: row.get(f"efficiency_{kind}") for kind in kinds}
    return Accelerator(
        name=name,
        backend=row["backend"],
        memory_bytes=row.get("memory_bytes"),
        peak_flops_per_s={kind: rate for kind, rate in peaks.items() if rate is not None},
        efficiency={kind: share for kind, share in shares.items() if share is not None},
        memory_bytes_per_s=row.get("memory_bytes_per_s"),
        link_bytes_per_s=row["link_bytes_per_s"],
        network_node_bytes_per_s=row["network_node_bytes_per_s"],
        num_per_node=row["num_per_node"],
        overhead_bytes=row["overhead_bytes"],
        allocator_slack=row["allocator_slack"],
        smi_names=tuple(row["smi_names"]),
        source=row["source"],
    )


def _unknown(code: str, kind: str, name: str, known: Iterable[str], where: str) -> Problem:
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.4)
    nearest = " or ".join(f"`{by_lower[each]}`" for each in near)
    everything = ", ".join(by_lower.values())
    return Problem(
        code=code,
        what=f"the catalog has no {kind} `{name}`",
        where=where,
        fix=f"did you mean {nearest}? Known are {everything}"
        if near
        else f"choose one of {everything}",
    )

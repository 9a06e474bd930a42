"""What an engine holds for each parameter and keeps of each token, for a table of layouts."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.catalog.engines import Engine
from paceline.choices import Compression
from paceline.choices.optimizers import OPTIMIZERS
from paceline.estimate.inputs import Holdings, Traffic
from paceline.estimate.sharding import ways_of
from paceline.parallel.table import Layouts, code_of
from paceline.profile import Kernels, ModelProfile, runtime_kernels
from paceline.profile.adapter import NF4_BYTES, OWN_NF4_BYTES
from paceline.profile.block import Value, matrices
from paceline.profile.saved import modules_of
from paceline.topology import Cluster

_GLIBC_SHARE = 1.25
"""What a process on a CPU holds for each byte of its tensors: 708 MiB resident for 562 MiB after
three steps of a 19M decoder (Python 3.11, torch 2.13 CPU, AMD EPYC Zen 4)."""

_SPREAD_ENDS = 3
"""Between ranks that share the experts what came back is kept beside its rows in order:
`index_copy` keeps its source (`runtime/strategy/expert/all_to_all.py`)."""

_ZERO2 = code_of("sharding", "zero2")

HOST_MEMORY_BYTES_PER_S = 200e9
"""Memory bandwidth of one node, read and written by optimizers on its cores. CPU-Adam reaches 109
GB/s of 256 on two sockets of six DDR4 channels (28 B for each of 10e9 parameters in 2.57 s:
ZeRO-Offload, arXiv:2101.06840, table 4); two of eight DDR5 channels peak at 614, and a third of it
is taken."""

_DISK_BYTES_PER_S = 3e9
"""Between a host and its NVMe disk: a data-centre disk's data sheet, PCIe 4.0 x4 shared by two
ranks, a guess."""


def holdings_of(
    engine: Engine,
    cluster: Cluster,
    layouts: Layouts,
    *,
    precision: str,
    optimizer: str,
    profile: ModelProfile,
) -> Holdings:
    """Bytes that an engine holds in a precision, with an optimizer."""
    wide = precision in ("fp32", "tf32")
    narrow = 4.0 if wide else 2.0
    wider: Value = 1.0
    if not wide and engine.sharded_bytes > engine.weight_bytes:
        is_fsdp = (layouts.sharding >= _ZERO2) & (layouts.shard > 1)
        wider = np.where(is_fsdp, engine.sharded_bytes / engine.weight_bytes, 1.0)
    moment_share = 1.0 if wide else _moment_share(engine, optimizer, profile, wider)
    ways = ways_of(engine)
    if cluster.backend == "gloo":  # what a process has freed stays resident
        ways = replace(ways, frees_gradients=0.0, side_streams=0.0)
    has_temporaries = cluster.backend != "gloo" and optimizer != "adamw-8bit"
    return Holdings(
        weight_bytes=4.0 if wide else engine.weight_bytes,
        sharded_bytes=4.0 if wide else engine.sharded_bytes,
        gradient_bytes=4.0 if wide else engine.gradient_bytes * wider,
        passing_bytes=0.0 if wide else engine.passing_bytes,
        master_bytes=0.0 if wide else engine.master_bytes,
        moment_bytes=OPTIMIZERS[optimizer].moment_bytes * moment_share,
        root_moment_bytes=_root_moment_bytes(engine, optimizer, profile) * moment_share,
        gathered_bytes=narrow,
        step_bytes=engine.step_bytes * wider * has_temporaries,
        step_unit=engine.step_unit or np.inf,
        buffer_bytes=engine.buffer_bytes,
        cast_bytes=0.0 if wide else engine.cast_bytes,
        reduce_bytes=4.0 if wide else engine.reduce_bytes,
        frozen_bytes=narrow,
        frozen_block_bytes=profile.frozen_block_bytes(
            narrow, OWN_NF4_BYTES if "restores_frozen" in engine.ways else NF4_BYTES
        ),
        is_frozen=float(profile.adapter is not None),
        scaled_columns=0.0 if profile.adapter is None else profile.adapter.scaled_columns,
        scaled_rows=0.0 if profile.adapter is None else profile.adapter.scaled_rows,
        dummy_gradients=float(engine.dummy_gradients and not wide),
        kernels=_kernels(engine, cluster, layouts, profile, wide=wide),
        overhead_bytes=cluster.overhead_bytes,
        reserved_share=_GLIBC_SHARE if cluster.backend == "gloo" else engine.reserved_share,
        selective_cheap=float(engine.selective_cheap),
        gathered_inputs=float(engine.gathered_inputs),
        ways=ways,
        saving_share=float(cluster.backend == "gloo"),
        has_host=float(cluster.has_host),
    )


def _moment_share(engine: Engine, optimizer: str, profile: ModelProfile, wider: Value) -> Value:
    """Bytes of moments as a share of those in float32. Without a float32 copy they are in the
    parameters' own type."""
    if not OPTIMIZERS[optimizer].as_weights:
        return 1.0
    if engine.master_bytes > 0 or engine.weight_bytes == 4:
        has_experts = any(block.experts for block in profile.blocks)
        return 0.5 if has_experts and engine.narrow_routed_moments else 1.0
    return 0.5 * wider


def _root_moment_bytes(engine: Engine, optimizer: str, profile: ModelProfile) -> float:
    """An engine's moments for each parameter outside the blocks; one that keeps the token
    embedding's moments wide counts the embedding apart."""
    facts = OPTIMIZERS[optimizer]
    usual = facts.moment_bytes if facts.root_moment_bytes is None else facts.root_moment_bytes
    root = profile.num_root_parameters
    if optimizer != "adamw-8bit" or not engine.wide_embedding_moments or not root:
        return usual
    embedding = profile.num_embedding_parameters / root
    return embedding * OPTIMIZERS["adamw"].moment_bytes + (1 - embedding) * usual


_CLIP_BYTES = 12.0
"""Our own runtime reads each gradient for the norm, and reads and writes it to scale it: two
kernels of their own (`runtime/strategy/gradients.py`). Other engines' clipping is in `step_s`."""


def traffic_of(
    engine: Engine,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str,
    replica_share: float = 1.0,
) -> Traffic:
    """Bytes of a parameter on the wire and through the optimizer.

    Args:
        engine: That runs the step.
        cluster: On which: its accelerators' link to their host.
        precision: Of the matrix multiplications.
        optimizer: One of `OPTIMIZERS`.
        replica_share: What compression leaves of all-reduced gradients: `compressed_share`.
    """
    wide = precision in ("fp32", "tf32")
    weights = 4.0 if wide else engine.weight_bytes
    master = 0.0 if wide else engine.master_bytes
    gradient = 4.0 if wide else engine.gradient_bytes
    moments = OPTIMIZERS[optimizer].moment_bytes
    updated = 2 * master + weights if master else 2 * weights
    ways = ways_of(engine)
    if precision != "bf16":
        ways = replace(ways, zero1_waits=0.0)
    clipped = _CLIP_BYTES if "autocasts" in engine.ways else 0.0
    return Traffic(
        weight_bytes=4.0 if wide else 2.0,
        element_bytes=4.0 if wide else 2.0,
        reduce_bytes=4.0 if wide else engine.reduce_bytes,
        sharded_bytes=4.0 if wide else engine.sharded_bytes,
        optimizer_bytes=gradient + updated + 2 * moments + clipped,
        is_muon=float(optimizer == "muon"),
        crossing_bytes=gradient + weights,
        host_bytes_per_s=cluster.copy_bytes_per_s,
        host_memory_bytes_per_s=HOST_MEMORY_BYTES_PER_S / cluster.ranks_per_node,
        disk_bytes_per_s=_DISK_BYTES_PER_S,
        replica_share=replica_share,
        ways=ways,
    )


def compressed_share(profile: ModelProfile, kind: Compression, rank: int = 4) -> float:
    """Share of the bytes of float32 gradients that is sent.

    PowerSGD sends a matrix of N x M as rank x (N + M) numbers where those are at most half as many,
    and everything else as it is; matrices that the profile holds together (key and value; up and
    gate) are two. Source: Vogels et al., arXiv:1905.13727; `runtime/strategy/data/hooks.py`.

    >>> from paceline.profile import DecoderShape, profile_decoder
    >>> shape = DecoderShape(layers=2, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024,
    ...     vocab=512, tied_embeddings=True)
    >>> compressed_share(profile_decoder(shape, 64), "bf16")
    0.5
    >>> round(compressed_share(profile_decoder(shape, 64), "powersgd"), 4)
    0.0139
    """
    if kind != "powersgd":
        return 1.0 if kind == "none" else 0.5
    total = sent = 0.0
    for rows, columns, count in _gradient_matrices(profile):
        thin = rank * (rows + columns)
        total += count * rows * columns
        sent += count * (thin if 2 * thin <= rows * columns else rows * columns)
    others = profile.num_parameters - total
    return (sent + others) / max(profile.num_parameters, 1)


def _gradient_matrices(profile: ModelProfile) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and how many of every matrix of the model that gets a gradient of its own."""
    for block in profile.blocks:
        for each in matrices(block):
            is_gated = each.name in ("up", "shared_up", "expert_up") and block.gated
            parts = 2 if is_gated or each.name in ("key_value", "cross_key_value") else 1
            if each.outputs:
                yield each.inputs, each.outputs // parts, block.count * each.copies * parts
    ends = 1 if profile.tied else 2
    if profile.head_inputs and profile.head_outputs:
        yield profile.head_inputs, profile.head_outputs, ends


def is_written(profile: ModelProfile, engine: Engine) -> bool:
    """Whether the engine runs transformers' code of a model: our own runtime does where it has no
    decoder of its own for it."""
    if "autocasts" in engine.ways:
        return not profile.is_built_in
    return "transformers" in engine.ways


def _kernels(
    engine: Engine, cluster: Cluster, layouts: Layouts, profile: ModelProfile, *, wide: bool
) -> Kernels:
    """Our own runtime keeps other tensors under autocast (not sharded) than with FSDP2, and than
    beside adapters: there the embedding is in the narrow type itself. A model that is not its own
    decoder is transformers' code."""
    if "autocasts" in engine.ways:
        written = float(is_written(profile, engine))
        fused = cluster.backend != "gloo" or not profile.is_built_in
        ends = np.where(layouts.expert > 1, _SPREAD_ENDS, 2)
        if wide:
            return replace(
                runtime_kernels("fp32", fused_norm=fused), written=written, routed_ends=ends
            )
        has_adapter = profile.adapter is not None
        cast = runtime_kernels("bf16-autocast", fused_norm=fused)
        sharded = runtime_kernels("bf16-sharded", fused_norm=fused)
        is_sharded = layouts.keeps_shards() | has_adapter
        # Between tensor ranks what enters several matrices is cast once, before it crosses.
        is_once = is_sharded | (layouts.tensor > 1)
        columns = {
            name: np.where(narrow, getattr(sharded, name), getattr(cast, name))
            for name, narrow in (
                ("stream_bytes", is_sharded),
                ("norm_bytes", is_sharded),
                ("attention_casts", is_once),
                ("ffn_casts", is_once),
            )
        }
        return replace(cast, **columns, written=written, routed_ends=ends)
    size = 4 if wide else 2
    scale: Value = size / 2
    return Kernels(
        compute_bytes=size,
        stream_bytes=size,
        norm_bytes=engine.norm_bytes * scale,
        attention_casts=engine.attention_casts,
        ffn_casts=engine.ffn_casts,
        gated_copies=engine.gated_copies,
        plain_copies=engine.plain_copies,
        written=float(is_written(profile, engine)),
        score_bytes=engine.score_bytes,
        dropout_bytes=engine.dropout_bytes,
        second_products=float(engine.second_products),
        modules=modules_of(engine.recompute_modules),
        logit_bytes=engine.logit_bytes,
        loss_peak_bytes=engine.loss_peak_bytes,
    )

"""The rates that seconds are worked out from: what one kind of machine and software reaches.

Every field is a number, or a column with one entry a row when thousands of runs on different
machines are priced at once (`benchmarks/planner_accuracy.py`).
"""

from dataclasses import dataclass
from math import sqrt

from paceline.catalog.efficiencies import AS_OTHER, Efficiencies
from paceline.catalog.engines import Engine
from paceline.profile.block import Value
from paceline.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """How fast matrices are multiplied. Time is a smooth maximum of a compute and a memory roof:

        t = launch + ((2 M N K / (peak x share) x waves x (1 + short_k / K))^4
                      + (bytes / memory)^4)^(1/4)

    Source: fitted to NVIDIA aiconfigurator's 7.8 M measured products, design/planner.md 3.2.
    """

    flops_per_s: Value
    """Peak x share x what a long training run sustains of it."""

    short_k: Value
    """K at which a product takes twice as long for each multiplication."""

    wave: Value
    """How much of a half-empty last wave of tiles is lost."""

    launch_s: Value
    """Of one kernel on the device."""

    bytes_per_s: Value
    """Memory bandwidth that products reach."""

    num_multiprocessors: Value
    """Tiles computed at a time."""

    operand_bytes: Value
    """One element of an operand: 2 in bf16, 1 in fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a rank reaches, and the links between ranks."""

    matmul: MatmulRate
    """In the precision of the linear layers."""

    attention_flops_per_s: Value
    """Scores and weighted values, at endless sequence length."""

    attention_half_len: Value
    """Tokens at which attention reaches half of that."""

    attention_backward: Value
    """Rate of its backward pass as a share of its forward pass."""

    is_flash: Value
    """1 with a flash kernel, 0 where scores are written to memory."""

    memory_bytes_per_s: Value
    """Bandwidth that elementwise operations and the optimizer reach."""

    hidden_passes: Value
    """Times that a block's forward pass reads or writes the residual stream, besides matrices."""

    ffn_passes: Value
    """The same for each tensor as wide as the feed-forward layer."""

    host_s: Value
    """Host time to launch one operation; 0 with graphs, where the host is never the slowest."""

    routed_ops: Value
    """Operations that routing adds to a block's forward pass, those that wait for the device
    counted by how long they wait."""

    grouped_share: Value
    """Rate of a grouped product as a share of a single one's of the same shape."""

    link_bytes_per_s: Value
    """Inside the scale-up domain, each rank and direction, as collectives reach it."""

    gather_share: Value
    """Rate of all-gather and reduce-scatter as a share of all-reduce's: 1, or less with gloo."""

    ramp_bytes: Value
    """Payload at which a ring reaches half of its bandwidth."""

    link_latency_s: Value
    """One collective's latency inside the domain."""

    domain: Value
    """Ranks in one scale-up domain: at least those of a node, which PCIe joins where nothing
    faster does."""

    network_bytes_per_s: Value
    """Between domains, each rank and direction, as collectives reach it."""

    network_latency_s: Value
    """One collective's latency between domains."""

    gradient_overlap: Value
    """Share of the gradients' reduction that may hide behind the last backward pass."""

    gather_overlap: Value
    """Share of full sharding's gathers and reductions that may hide behind compute."""

    tensor_overlap: Value
    """Share of tensor parallelism's collectives hidden behind its matrices."""

    expert_overlap: Value
    """Share of the exchange of tokens between experts' ranks hidden behind compute."""

    pipeline_overlap: Value
    """Share of the transfers between stages hidden behind compute."""

    selective_cheap: Value
    """1 where selective recompute does norms and activation functions again."""

    selective_products: Value
    """Share of the matrices that selective recompute does again."""

    contention: Value
    """How much slower compute gets for each second of communication hidden behind it."""

    straggler: Value
    """Added for each doubling of the number of domains."""

    step_s: Value
    """Of each step, whatever its size: data, clipping, logging, synchronisation."""


def rates_of(
    cluster: Cluster, engine: Engine, precision: str, efficiencies: Efficiencies
) -> Rates | None:
    """What an engine reaches on a cluster in a precision; None where a needed rate is unknown."""
    peak = _peak(cluster, precision)
    wide = next((rate for name in ("bf16", "fp16", "fp32") if (rate := _peak(cluster, name))), None)
    memory, link = cluster.memory_bytes_per_s, cluster.link_bytes_per_s
    network = cluster.network_bytes_per_s
    needs_network = cluster.num_ranks > cluster.ranks_per_node
    if peak is None or wide is None or memory is None:
        return None
    if (cluster.num_ranks > 1 and link is None) or (needs_network and network is None):
        return None
    e, s = efficiencies, efficiencies.step
    family = e.family_of(cluster.accelerator)
    product = e.matmul_of(cluster.accelerator, precision)
    kind = AS_OTHER.get(precision, precision)
    lasting = e.sustained.get(family, e.sustained["other"])
    narrow = e.sustained_by_precision.get(kind, 1.0)
    kernel = _kernel(engine, family)
    is_gloo = cluster.backend == "gloo"
    waits_for_host = not is_gloo and family not in engine.graphs_on
    is_narrow = kind in e.sustained_by_precision
    return Rates(
        matmul=MatmulRate(
            flops_per_s=peak * product.share * lasting * narrow,
            short_k=product.short_k,
            wave=product.wave,
            launch_s=product.launch_s,
            bytes_per_s=memory * product.memory_share,
            num_multiprocessors=cluster.num_multiprocessors or _USUAL_MULTIPROCESSORS,
            operand_bytes=_OPERAND_BYTES[kind],
        ),
        attention_flops_per_s=wide * e.attention.get(kernel, 1.0) * sqrt(lasting),
        attention_half_len=e.attention_half_len.get(family, e.attention_half_len["other"]),
        attention_backward=e.attention["backward"],
        is_flash=float(kernel != "unfused"),
        memory_bytes_per_s=memory * s["memory_share"],
        hidden_passes=e.hidden_passes[engine.host] + e.hidden_passes["narrow"] * is_narrow,
        ffn_passes=e.ffn_passes[engine.host],
        host_s=e.host_s[engine.host] * waits_for_host,
        routed_ops=s["routed_ops"],
        grouped_share=s["grouped_share"],
        link_bytes_per_s=(link or 1.0) * s["gloo_share" if is_gloo else "link_share"],
        gather_share=cluster.gather_share if is_gloo else 1.0,
        ramp_bytes=0.0 if is_gloo else RAMP_BYTES,
        link_latency_s=s["link_latency_s"],
        domain=cluster.num_ranks if is_gloo else max(cluster.scale_up_size, cluster.ranks_per_node),
        network_bytes_per_s=_network_of_rank(cluster) * s["network_share"],
        network_latency_s=s["network_latency_s"],
        gradient_overlap=s["gradient_overlap"] * _hides(cluster, engine.overlaps_gradients),
        gather_overlap=s["gather_overlap"] * _hides(cluster, engine.overlaps_gathers),
        tensor_overlap=s["tensor_overlap"] * _hides(cluster, engine.overlaps_tensor),
        expert_overlap=s["expert_overlap"] * _hides(cluster, engine.overlaps_tensor),
        pipeline_overlap=s["pipeline_overlap"] * _hides(cluster, engine.overlaps_pipeline),
        selective_cheap=float(engine.selective_cheap),
        selective_products=engine.selective_products,
        contention=s["contention"],
        straggler=s["straggler"],
        step_s=_CPU_STEP_S if is_gloo else s["step_s"],
    )


RAMP_BYTES = 4e6
"""Of NCCL's rings. 8 H100: 219 GB/s at 16 MB of 336; 8 A100: 109 of 205. Source:
design/planner.md 3.2, Collectives (4 MB a link and a ring step)."""

_CPU_STEP_S = 0.015
"""Of a step on a CPU: small operations, clipping, logging. What two jobs took beyond their products
and collectives (86 to 95 ms where 76 were estimated; 824 where 876): AMD EPYC, 2 cores."""

_OPERAND_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""One element of an operand; NVFP4 has a scale of one byte for each 16 elements."""

_USUAL_MULTIPROCESSORS = 108
"""Taken where the catalog has none: an A100's. It only rounds tiles up to whole waves."""

_BEFORE_HOPPER = ("V100", "A100", "other", "cpu", "AMD", "TPU")


def _kernel(engine: Engine, family: str) -> str:
    """Flash attention 3 and cuDNN's need Hopper; versions 1 and 2 run there at a share of their
    own, as they do not use its asynchronous instructions."""
    if family in _BEFORE_HOPPER:
        return "flash2" if engine.attention == "flash3" else engine.attention
    is_older = engine.attention in ("flash1", "flash2")
    return f"{engine.attention}_hopper" if is_older else engine.attention


def _peak(cluster: Cluster, precision: str) -> float | None:
    kind = {"nvfp4": "fp4"}.get(precision, precision)
    return cluster.peak_flops_per_s.get(kind)


def _hides(cluster: Cluster, overlaps: bool) -> float:
    """On a CPU nothing is hidden, as the same cores do both."""
    return float(overlaps and cluster.backend != "gloo")


def _network_of_rank(cluster: Cluster) -> float:
    """Each rank's part of its node's network; a rack's inner links are the scale-up domain."""
    network = cluster.network_bytes_per_s or cluster.link_bytes_per_s or 1.0
    return network / cluster.ranks_per_node

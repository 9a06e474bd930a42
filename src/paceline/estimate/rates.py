"""The rates that seconds are worked out from: what one kind of machine and software reaches.

Every field is a number, or a column with one entry a row when thousands of runs on different
machines are priced at once (`benchmarks/planner_accuracy.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from paceline.catalog.efficiencies import AS_OTHER, Efficiencies
from paceline.catalog.engines import Engine
from paceline.profile.block import Value
from paceline.profile.saved import Modules, modules_of
from paceline.topology import Cluster, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """How fast matrices are multiplied. Time is a smooth maximum of a compute and a memory roof:

        t = launch + ((2 M N K / (peak x share) x waves x (1 + short_k / K))^4
                      + (bytes / memory)^4)^(1/4)

    Source: fitted to NVIDIA aiconfigurator's 7.8 M measured products.
    """

    flops_per_s: Value
    """Peak x share x what a long training run sustains of it."""

    short_k: Value
    """K at which a product takes twice as long for each multiplication."""

    wave: Value
    """How much of a half-empty last wave of tiles is lost."""

    launch_s: Value
    """Launch of one kernel, on the device."""

    bytes_per_s: Value
    """Memory bandwidth that products reach."""

    num_multiprocessors: Value
    """Tiles computed at a time."""

    operand_bytes: Value
    """One element of an operand: 2 in bf16, 1 in fp8."""

    output_bytes: Value = 2.0
    """One element of the product: 4 in fp32, else 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What collectives reach over one level of links, each rank and direction."""

    size: Value
    """Ranks of one group of this level, those of the levels inside it included."""

    gather_bytes_per_s: Value
    """All-gather and reduce-scatter, when the whole group takes part."""

    all_reduce_bytes_per_s: Value
    """All-reduce, in bytes on the wire."""

    all_to_all_bytes_per_s: Value
    """All-to-all and point-to-point."""

    latency_s: Value
    """One hop."""

    pair_bytes_per_s: Value
    """Most that an all-gather or all-reduce of two blocks reaches."""

    peers: Value = 1.0
    """Ranks that each rank has a link of its own to: 7 in a mesh of 8, 1 behind a switch."""

    axes: Value = 1.0
    """Rings that each rank is part of: 2 or 3 in a torus, else 1."""

    spare: Value = 1.0
    """How many times these rates one rank reaches while the others of its node are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a rank reaches, and the links between ranks."""

    matmul: MatmulRate
    """In the precision of the linear layers."""

    wide_matmul: MatmulRate
    """Rate of products that stay in 16 bits beside narrower ones: the head's, Muon's and unfused
    attention's. As `matmul` where nothing is narrow."""

    weight_matmul: MatmulRate
    """Rate of the products that give the gradients of matrices in the blocks."""

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
    """Times that a block's forward pass reads or writes each tensor as wide as the feed-forward
    layer, besides matrices."""

    host_s: Value
    """Host time to launch one operation; 0 with graphs, where the host is never the slowest."""

    routed_ops: Value
    """Operations that routing adds to a block's forward pass, those that wait for the device
    counted by how long they wait."""

    grouped_share: Value
    """Rate of a grouped product as a share of a single one's of the same shape."""

    levels: tuple[LinkRates, ...]
    """Links between ranks, innermost first. The last joins all ranks."""

    domain: Value
    """Ranks that reach each other without the network: those of a node or of a rack."""

    collective_s: Value
    """Start of one collective, whatever its size and group."""

    gradient_overlap: Value
    """Share of the gradients' reduction that may hide behind the last backward pass."""

    gather_overlap: Value
    """Share of full sharding's gathers and reductions that may hide behind compute."""

    tensor_overlap: Value
    """Share of tensor parallelism's collectives hidden behind its matrices."""

    pipeline_overlap: Value
    """1 where messages between stages pass behind compute, as far as a schedule leaves some to do;
    0 where each is waited for."""

    selective_cheap: Value
    """1 where selective recompute does norms and activation functions again."""

    second_products: Value
    """1 where selective recompute does every second matrix again."""

    modules: Modules
    """What selective recompute does again of those that Megatron names."""

    selective_attention: Value
    """1 where selective recompute does attention again, whatever its kernel."""

    contention: Value
    """How much slower compute gets for each second of communication hidden behind it."""

    straggler: Value
    """Added for each doubling of the number of domains."""

    step_s: Value
    """Seconds of each step, whatever its size: data, clipping, logging, synchronisation."""


def rates_of(
    cluster: Cluster, engine: Engine, precision: str, efficiencies: Efficiencies
) -> Rates | None:
    """What an engine reaches on a cluster in a precision; None where a needed rate is unknown."""
    peak = _peak(cluster, precision)
    wide = next((rate for name in ("bf16", "fp16", "fp32") if (rate := _peak(cluster, name))), None)
    memory = cluster.memory_bytes_per_s
    if peak is None or wide is None or memory is None:
        return None
    if cluster.num_ranks > max((level.size for level in cluster.levels), default=1):
        return None
    e, s = efficiencies, efficiencies.step
    family = e.family_of(cluster.accelerator)
    lasting = e.of_accelerator(e.sustained, cluster.accelerator)
    has_hopper = e.has_hopper_kernels(cluster.accelerator)
    kernel = _kernel(engine, has_hopper=has_hopper)
    is_gloo = cluster.backend == "gloo"
    waits_for_host = not is_gloo and family not in engine.graphs_on
    is_narrow = AS_OTHER.get(precision, precision) in e.sustained_by_precision
    matmul = _matmul_rate(cluster, e, precision)
    wide_matmul = _matmul_rate(cluster, e, "bf16") if is_narrow else matmul
    casts = e.hidden_passes["narrow"] * is_narrow * (_ROW_CASTS if engine.row_scales else 1)
    return Rates(
        matmul=matmul,
        wide_matmul=wide_matmul,
        weight_matmul=wide_matmul if engine.wide_weight_gradients else matmul,
        attention_flops_per_s=wide
        * e.attention.get(kernel, 1.0)
        * _of_flash2(engine.attention, has_hopper=has_hopper)
        * sqrt(lasting),
        attention_half_len=e.of_accelerator(e.attention_half_len, cluster.accelerator),
        attention_backward=e.attention["backward"],
        is_flash=float(kernel != "unfused"),
        memory_bytes_per_s=memory * s["memory_share"],
        hidden_passes=e.hidden_passes[engine.host] + casts,
        ffn_passes=e.ffn_passes[engine.host],
        host_s=e.host_s[engine.host] * waits_for_host,
        routed_ops=_GROUPED_OPS if "groups_experts" in engine.ways else s["routed_ops"],
        grouped_share=s["grouped_share"],
        levels=_all_link_rates(cluster, s),
        domain=cluster.num_ranks if is_gloo else cluster.domain,
        collective_s=0.0 if is_gloo else _COLLECTIVE_S,
        gradient_overlap=s["gradient_overlap"] * _hides(cluster, engine.overlaps_gradients),
        gather_overlap=s["gather_overlap"] * _hides(cluster, engine.overlaps_gathers),
        tensor_overlap=s["tensor_overlap"] * _hides(cluster, engine.overlaps_tensor),
        pipeline_overlap=_hides(cluster, engine.overlaps_pipeline),
        selective_cheap=float(engine.selective_cheap),
        second_products=float(engine.second_products),
        modules=modules_of(engine.recompute_modules),
        selective_attention=float(engine.selective_attention),
        contention=s["contention"],
        straggler=s["straggler"],
        step_s=_CPU_STEP_S if is_gloo else s["step_s"],
    )


def _matmul_rate(cluster: Cluster, e: Efficiencies, precision: str) -> MatmulRate:
    """Large matrices in a precision, whose peak the cluster has, or that of the widest it has."""
    product = e.matmul_of(cluster.accelerator, precision)
    kind = AS_OTHER.get(precision, precision)
    peak = _peak(cluster, precision) or _peak(cluster, "fp16") or _peak(cluster, "fp32") or 0.0
    lasting = e.of_accelerator(e.sustained, cluster.accelerator)
    return MatmulRate(
        flops_per_s=peak * product.share * lasting * e.sustained_by_precision.get(kind, 1.0),
        short_k=product.short_k,
        wave=product.wave,
        launch_s=product.launch_s,
        bytes_per_s=(cluster.memory_bytes_per_s or 0.0) * product.memory_share,
        num_multiprocessors=cluster.num_multiprocessors or _USUAL_MULTIPROCESSORS,
        operand_bytes=_OPERAND_BYTES[kind],
        output_bytes=max(2.0, _OPERAND_BYTES[kind]),
    )


_GROUPED_OPS = 31.0
"""Counted in a trace of `paceline prove` of transformers' Mixtral (5.23, grouped_mm): 60 operations
of a block's forward pass and 99 of its backward pass, where a dense block has 29 and 49."""

_ROW_CASTS = 2
"""Times that a tensor is cast where each row has a scale: once along each dim it is summed over, in
the forward and in the backward pass. With one scale the transpose is the same numbers. Source:
pytorch/ao 0.10, float8/float8_linear.py, matmul_with_hp_or_float8_args, _get_input_output_axes."""

_COLLECTIVE_S = 14e-6
"""NCCL's own constant for a ring with LL128, whose hops are the catalog's latencies. Source:
NVIDIA/nccl, src/graph/tuning.cc, baseLat (version 2.21). With it an all-gather of 16 MB on 8 GPUs
takes 69 us on H100 and 50 us on B200; 64 and 49 were measured, and 128 on A100, where it is 95."""

_SHARE_INSIDE, _SHARE_BETWEEN = 0.7, 0.85
"""Share of a link's rate that collectives reach where the catalog has no measurement: about what
they reach on the links that were measured (0.68 to 0.75 inside a node, 0.85 between nodes)."""


def _all_link_rates(cluster: Cluster, measured: Mapping[str, float]) -> tuple[LinkRates, ...]:
    """With gloo the innermost level alone, as simulated nodes are one machine."""
    is_gloo = cluster.backend == "gloo"
    levels = cluster.levels[:1] if is_gloo else cluster.levels
    return tuple(_link_rates(each, measured, is_gloo=is_gloo) for each in levels) or (_ALONE,)


_ALONE = LinkRates(
    size=1,
    gather_bytes_per_s=1.0,
    all_reduce_bytes_per_s=1.0,
    all_to_all_bytes_per_s=1.0,
    latency_s=0.0,
    pair_bytes_per_s=1.0,
)
"""One rank, which sends nothing."""


def _link_rates(level: Level, measured: Mapping[str, float], *, is_gloo: bool) -> LinkRates:
    """A level as collectives see it.

    Args:
        level: Its raw rate, and the shares that the catalog knows.
        measured: `[step]` of the efficiencies. A calibrated machine has `link_share` and
            `link_latency_s`, or `network_...`, which are taken instead of the catalog's.
        is_gloo: Whether `gloo_share` scales the rate.
    """
    share = shipped_share(level)
    all_reduce = (level.all_reduce_share or share) / share
    all_to_all = (level.all_to_all_share or share) / share
    most = max(1.0, all_reduce)
    name = "network" if level.name == "network" else "link"
    scale = measured["gloo_share"] if is_gloo else 1.0
    reached = level.bytes_per_s * scale * measured.get(f"{name}_share", share)
    return LinkRates(
        size=level.size,
        gather_bytes_per_s=reached,
        all_reduce_bytes_per_s=reached * all_reduce,
        all_to_all_bytes_per_s=reached * all_to_all,
        latency_s=measured.get(f"{name}_latency_s", level.latency_s),
        pair_bytes_per_s=reached * (level.pair_share / share if level.pair_share else most),
        peers=level.num_links if level.shape == "mesh" else 1.0,
        axes=level.num_links / 2 if level.shape == "torus" else 1.0,
        spare=level.spare,
    )


def shipped_share(level: Level) -> float:
    """Share of a level's rate that all-gathers reach: the catalog's, or the usual one."""
    usual = _SHARE_BETWEEN if level.name == "network" else _SHARE_INSIDE
    return level.collective_share or usual


_CPU_STEP_S = 0.015
"""Seconds of a step on a CPU: small operations, clipping, logging. What two jobs took beyond their
products and collectives (86 to 95 ms where 76 were estimated; 824 where 876): AMD EPYC, 2 cores."""

_OPERAND_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""One element of an operand; NVFP4 has a scale of one byte for each 16 elements."""

_USUAL_MULTIPROCESSORS = 108
"""Taken where the catalog has none: an A100's. It only rounds tiles up to whole waves."""


_OF_FLASH2 = {"flex": {False: (0.90, 0.85), True: (1.25, 1.03)}}
"""Rates of a kernel's forward and backward pass as shares of FlashAttention 2's, on an A100 and on
a Hopper, whose instructions version 2 does not use. Source: PyTorch's blog "FlexAttention: The
Flexibility of PyTorch with the Performance of FlashAttention" (August 2024) for the A100, and the
abstract of Guessous's talk of that name at GTC 2025 for both."""


def _of_flash2(attention: str, *, has_hopper: bool) -> float:
    """Rate of a kernel's two passes together as a share of FlashAttention 2's: two products forward
    and five backward."""
    if attention not in _OF_FLASH2:
        return 1.0
    forward, backward = _OF_FLASH2[attention][has_hopper]
    return 7 / (2 / forward + 5 / backward)


def _kernel(engine: Engine, *, has_hopper: bool) -> str:
    """Flash attention 3 and cuDNN's need Hopper; versions 1 and 2 run there at a share of their
    own, as they do not use its asynchronous instructions."""
    asked = "flash2" if engine.attention in _OF_FLASH2 else engine.attention
    if not has_hopper:
        return "flash2" if asked == "flash3" else asked
    return f"{asked}_hopper" if asked in ("flash1", "flash2") else asked


def _peak(cluster: Cluster, precision: str) -> float | None:
    kind = {"nvfp4": "fp4"}.get(precision, precision)
    return cluster.peak_flops_per_s.get(kind)


def _hides(cluster: Cluster, overlaps: bool) -> float:
    """On a CPU nothing is hidden, as the same cores do both."""
    return float(overlaps and cluster.backend != "gloo")

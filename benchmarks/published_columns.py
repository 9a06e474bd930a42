"""Published runs as columns: one row a run, priced together by `paceline.estimate`.

Rates and holdings of a run are those that `paceline plan` would use for its accelerator, engine and
precision; they are worked out once for each combination that occurs and laid out in columns.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from published import Run

from paceline.catalog import Accelerator, find_accelerator, load_accelerators, load_links
from paceline.catalog.efficiencies import Efficiencies
from paceline.errors import JobError
from paceline.estimate.engine_memory import holdings_of, traffic_of
from paceline.estimate.inputs import Holdings, Model, Traffic
from paceline.estimate.memory import (
    allocated_bytes,
    fullest,
    memory_parts,
)
from paceline.estimate.rates import Rates, rates_of
from paceline.estimate.step import step_terms
from paceline.parallel.table import (
    CONTEXT_KINDS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Layouts,
)
from paceline.profile import ModelProfile
from paceline.profile.block import Block, Written
from paceline.topology import Cluster, find_levels
from paceline.topology.levels import host_bytes_per_s

_INTERLEAVES = ("megatron", "megatron-2021", "megatron-bridge")
_MAX_CHUNKS = 4
"""Chunks taken where a source does not state them and the engine interleaves."""

_FEW_TRAINED = 0.005
"""Trained share of a model with adapters; of no weight for its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Runs side by side, ready to be priced."""

    runs: tuple[Run, ...]
    model: Model
    layouts: Layouts
    traffic: Traffic
    holdings: Holdings
    kinds: tuple[list[Run], Any]
    """One run of each cluster, engine and precision, and every run's place in them."""

    def step_s(self, efficiencies: Efficiencies) -> Any:
        """Seconds of a step of every run."""
        return sum(self.terms(efficiencies).values())

    def terms(self, efficiencies: Efficiencies) -> dict[str, Any]:
        """The same by term."""
        firsts, index = self.kinds
        rates = _stack([_rates(run, efficiencies) for run in firsts])
        return step_terms(self.model, self.layouts, _take(rates, index), self.traffic)

    def needed_bytes(self) -> Any:
        """What the fullest rank takes of its device, which decides whether a run fits."""
        worst = fullest(self.model, self.layouts, self.holdings)
        return allocated_bytes(worst) + worst["slack"] + worst["overhead"]

    def peak_bytes(self) -> Any:
        """Memory of the rank that was measured, in the metric it was measured in."""
        worst = fullest(self.model, self.layouts, self.holdings)
        first = memory_parts(self.model, self.layouts, self.holdings, [0])[0]
        is_first = np.array(["rank 0 only" in run.notes for run in self.runs])
        parts = {name: np.where(is_first, first[name], worst[name]) for name in worst}
        metric = np.array([run.metric for run in self.runs])
        reserved = allocated_bytes(parts) + parts["slack"]
        device = reserved + parts["overhead"]
        other = np.where(metric == "reserved", reserved, device)
        return np.where(metric == "allocated", allocated_bytes(parts), other)


def columns_of(runs: Sequence[Run], micro_batches: dict[str, int] | None = None) -> Columns:
    """The columns of runs whose accelerator is in the catalog.

    Args:
        runs: As `published.read` gives them.
        micro_batches: Of runs whose source does not state it.
    """

    def column(of: Callable[[Run], Any], kind: Any = float) -> Any:
        return np.array([of(run) for run in runs], kind)

    def micro_batch(run: Run) -> int:
        return run.micro_batch or (micro_batches or {}).get(run.id, 1)

    def accumulation(run: Run) -> float:
        if run.global_batch:
            return max(1.0, run.global_batch / (run.data * micro_batch(run)))
        return run.accumulation or 1

    embedding = column(lambda run: run.vocab * run.hidden)
    tied = column(lambda run: run.tied, bool)
    model = Model(
        blocks=tuple(_block(runs, kind) for kind in (0, 1)),
        seq_len=column(lambda run: run.seq_len),
        head_inputs=column(lambda run: run.hidden),
        head_outputs=column(lambda run: run.vocab),
        num_embedding_parameters=embedding,
        num_head_parameters=np.where(tied, 0.0, embedding),
        num_tied_parameters=np.where(tied, embedding, 0.0),
        is_balanced=column(lambda run: run.engine.balances_stages, bool),
        trained_share=column(lambda run: _FEW_TRAINED if is_adapter(run) else 1.0),
    )
    layouts = Layouts(
        data=column(lambda run: run.data),
        sharding=column(lambda run: SHARDINGS.index(run.sharding), int),
        shard=column(_shard),
        micro_batch=column(micro_batch),
        accumulation=column(accumulation),
        reduce_every_micro_batch=column(lambda run: run.engine.reduces_each, bool),
        tensor=column(lambda run: run.tensor),
        sequence_parallel=column(lambda run: run.sequence_parallel, bool),
        pipeline=column(lambda run: run.pipeline),
        schedule=column(_schedule, int),
        chunks=column(_chunks),
        context=column(lambda run: run.context),
        context_kind=column(lambda run: CONTEXT_KINDS.index(run.context_kind), int),
        expert=column(_expert),
        recompute=column(lambda run: RECOMPUTES.index(run.recompute or "none"), int),
        recompute_every=column(lambda run: run.stated.recompute_every),
        offload=column(_offload, int),
        offload_parameters=column(lambda _: 0, int),
    )
    traffic = _stack([_traffic(run) for run in runs])
    holdings = _stack([_holdings(run, row) for row, run in enumerate(runs)])
    return Columns(
        runs=tuple(runs),
        model=model,
        layouts=layouts,
        traffic=traffic,
        holdings=holdings,
        kinds=_kinds(runs),
    )


def is_adapter(run: Run) -> bool:
    """Whether only adapters were trained: such runs are reported apart."""
    return run.task in ("lora", "qlora")


def why_out_of_scope(run: Run) -> str | None:
    """Why no estimate of a run can be made; None when one can."""
    try:
        cluster = cluster_of(run)
    except JobError:
        return f"the catalog has no accelerator `{run.accelerator}`"
    peak = {"nvfp4": "fp4"}.get(run.precision, run.precision)
    if peak not in cluster.peak_flops_per_s:
        return f"{cluster.accelerator} has no {run.precision}"
    if run.stated.unknown_schedule and run.pipeline > 1:
        return f"no engine of the catalog has the schedule {run.stated.unknown_schedule}"
    if run.pipeline > sum(block.count for block in run.blocks):
        return "it has more pipeline stages than blocks"
    if run.global_batch and run.global_batch < run.data:
        return "its batch is smaller than its data ranks"
    return None


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run, from the catalog and what its source says of the network."""
    return _cluster(run.accelerator, run.num_ranks, run.per_node, run.interconnect)


@cache
def _cluster(name: str, num_ranks: int, per_node: int, interconnect: str) -> Cluster:
    known = _accelerator(name)
    per_node = max(1, min(per_node, num_ranks))
    num_nodes = max(1, -(-num_ranks // per_node))
    declared = _network(interconnect, per_node)
    network = declared or known.network_node_bytes_per_s * per_node / known.num_per_node
    # A fast link of one node joins as many as the source's nodes have.
    if 1 < known.scale_up_size <= 16:
        known = replace(known, scale_up_size=per_node)
    levels = find_levels(
        known,
        load_links(),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        network_node_bytes_per_s=network,
    )
    return Cluster(
        accelerator=known.name,
        is_local=False,
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        backend=known.backend,
        cores_per_rank=None,
        memory_bytes=_memory_bytes(name, known),
        usable_bytes=_memory_bytes(name, known),
        overhead_bytes=known.overhead_bytes,
        peak_flops_per_s=known.peak_flops_per_s,
        memory_bytes_per_s=known.memory_bytes_per_s,
        link_bytes_per_s=None,
        host_link_bytes_per_s=host_bytes_per_s(known, load_links()),
        network_bytes_per_s=network,
        levels=levels,
        known={},
        num_multiprocessors=known.num_multiprocessors,
    )


def _memory_bytes(name: str, known: Accelerator) -> int:
    """The variant's own memory, where its name states one that the catalog's row has not."""
    listed = known.memory_bytes or 0
    stated = re.search(r"(\d+) ?Gi?B?\b", name, re.IGNORECASE)
    wanted = int(stated[1]) * 2**30 if stated else listed
    return wanted if not listed or abs(wanted / listed - 1) > _ANOTHER_VARIANT else listed


_ANOTHER_VARIANT = 0.15
"""GB and GiB, and what a driver keeps, are less than this share of a card's memory apart."""


def _accelerator(name: str) -> Accelerator:
    """The catalog's row; a spelling it lacks is read as family, form factor and memory.

    Raises:
        JobError: The catalog has nothing of that family.
    """
    try:
        return find_accelerator(name, where="published")
    except JobError:
        known = load_accelerators()
        bare = re.sub(r"^\d+ ?x ?|NVIDIA |AMD |Instinct |DGX |HGX ", "", name)
        family = re.match(r"(?:TPU[- ]?v?\d+\w?|[A-Za-z]+[- ]?\d+[A-Za-z]?)", bare)
        word = _letters(family[0] if family else bare).replace("TPU", "TPUV").replace("VV", "V")
        size = re.search(r"(\d+) ?G", bare)
        wanted = int(size[1]) * 1e9 if size else 0.0
        rows = [each for each in known.values() if _letters(each.name).startswith(word)]
        if not rows:
            raise
        is_pcie = "PCI" in name.upper()
        return min(
            rows,
            key=lambda row: (
                ("PCIe" in row.name) != is_pcie,
                abs((row.memory_bytes or 0) - wanted) if wanted else 0.0,
            ),
        )


def _letters(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def _network(text: str, per_node: int) -> float | None:
    """Bytes a second of a node from words such as `4x100Gb RoCE/node`, `RoCE 1600Gbps/node`.

    A rate without a count and without `/node` is that of one card for each accelerator.
    """
    if "TCPX" in text:
        return 4 * 25e9  # GCP A3: four cards of 200 Gb/s.
    rate = re.search(r"(\d+) ?Gb", text)
    if rate is None:
        return None
    count = re.search(r"(\d+) ?x", text)
    each = int(rate[1]) * 1e9 / 8
    if count is not None:
        return int(count[1]) * each
    return each if "/node" in text else per_node * each


def _block(runs: Sequence[Run], kind: int) -> Block:
    """One kind of block of every run; its sizes are columns."""
    sizes: dict[str, Any] = {}
    for each in fields(Block):
        if each.name not in ("name", "measured", "written"):
            sizes[each.name] = np.array(
                [float(getattr(run.blocks[kind], each.name)) for run in runs]
            )
    # A gate came with RMSNorm.
    return Block(name="published", written=Written(norm=sizes["gated"]), **sizes)


def _shard(run: Run) -> int:
    group = run.data * run.context
    if run.sharding == "none":
        return 1
    return min(run.shard or group, group)


def _chunks(run: Run) -> int:
    """As stated; else, where the engine interleaves, the most that divide a stage."""
    if run.pipeline == 1:
        return 1
    if run.stated.schedule == "zero-bubble":
        return run.stated.virtual_stages or run.chunks or 1
    interleaves = run.engine.name in _INTERLEAVES and run.stated.schedule in (None, "interleaved")
    if run.chunks or not interleaves:
        return run.chunks or 1
    on_stage = sum(block.count for block in run.blocks) / run.pipeline
    return max([1] + [n for n in range(2, _MAX_CHUNKS + 1) if on_stage % n == 0])


def _schedule(run: Run) -> int:
    stated = run.stated.schedule
    if run.pipeline > 1 and stated is not None and stated != "interleaved":
        return SCHEDULES.index(stated)
    return SCHEDULES.index("interleaved" if _chunks(run) > 1 else "1f1b")


def _offload(run: Run) -> int:
    """Optimizer state off the device; offloaded activations are not described."""
    if "ACTIVATION" in run.notes or run.engine.name == "megatron-bridge":
        return 0
    words = run.offload.lower()
    if run.stated.is_paged:
        return 1
    return 2 if "nvme" in words else int("cpu" in words or "host" in words)


def _expert(run: Run) -> int:
    """As stated; else every expert on a rank of its own as far as the ranks go."""
    if run.expert_stated or not run.blocks[1].experts:
        return run.expert
    return min(run.blocks[1].experts, run.data * run.context)


def _engine(run: Run) -> Any:
    """The run's engine, with what its notes say otherwise."""
    changes: dict[str, Any] = {}
    if run.is_compiled:
        changes["host"] = "compiled"
    if run.is_eager and run.engine.host == "compiled":
        changes["host"] = "eager"
    stated = run.stated
    if stated.attention is not None:
        changes["attention"] = stated.attention
        changes["score_bytes"] = 5 if stated.attention == "unfused" else 0
    if stated.no_logits:
        changes |= {"logit_bytes": 0, "loss_peak_bytes": 0}
    for name in ("row_scales", "wide_weight_gradients", "overlaps_tensor"):
        if getattr(stated, name):
            changes[name] = True
    ways = [way for way in ("one_copy_a_node", "hides_exchange") if getattr(stated, way)]
    changes["ways"] = (*run.engine.ways, *ways)
    if stated.reduce_bytes is not None:
        changes["reduce_bytes"] = stated.reduce_bytes
    if run.recompute_modules:
        changes["recompute_modules"] = tuple(re.findall(r"\w+", run.recompute_modules))
        changes["selective_attention"] = "core_attn" in run.recompute_modules
    if "fp32 grad accumulation" in run.notes and run.engine.passing_bytes == 0:
        # DeepSpeed's BF16_Optimizer: float32 gradients lie flat, and need no copy in the step.
        changes |= {"gradient_bytes": 4, "passing_bytes": 2, "reduce_bytes": 4, "step_bytes": 0}
    types = ("weight_bytes", "sharded_bytes", "gradient_bytes")
    if stated.parameter_bytes == 2:
        changes |= dict.fromkeys((*types, "reduce_bytes"), 2)
        changes |= {"master_bytes": 0, "cast_bytes": 0, "step_bytes": min(2, run.engine.step_bytes)}
    if stated.parameter_bytes == 4:
        changes |= dict.fromkeys(types, 4) | {"master_bytes": 0, "cast_bytes": 2}
    if stated.optimizer_in_backward:
        changes["gradient_bytes"] = 0
    return replace(run.engine, **changes)


def _kinds(runs: Sequence[Run]) -> tuple[list[Run], Any]:
    """One run of each cluster, engine and precision that occurs, and every run's place in them."""
    places: dict[Any, int] = {}
    firsts: list[Run] = []
    index = []
    for run in runs:
        key = (cluster_of(run).name, run.interconnect, _engine(run), run.precision)
        if key not in places:
            places[key] = len(firsts)
            firsts.append(run)
        index.append(places[key])
    return firsts, np.array(index, int)


def _rates(run: Run, efficiencies: Efficiencies) -> Rates:
    rates = rates_of(cluster_of(run), _engine(run), run.precision, efficiencies)
    assert rates is not None, run.id
    # As many levels for every run, so that they stand side by side; the last joins all ranks.
    same = (rates.levels[-1],) * (_MOST_LEVELS - len(rates.levels))
    return replace(rates, levels=(*rates.levels, *same))


_MOST_LEVELS = 3
"""A pair of cards, a node and the network."""


def _take(value: Any, index: Any) -> Any:
    """Rows of a dataclass of columns."""
    columns = {each.name: getattr(value, each.name) for each in fields(value)}
    return type(value)(
        **{
            name: tuple(_take(each, index) for each in column)
            if isinstance(column, tuple)
            else _take(column, index)
            if is_dataclass(column)
            else column[index]
            for name, column in columns.items()
        }
    )


def _traffic(run: Run) -> Traffic:
    return traffic_of(
        _engine(run), cluster_of(run), precision=run.precision, optimizer=run.stated.optimizer
    )


def _holdings(run: Run, row: int) -> Holdings:
    profile = ModelProfile(
        name=run.model_name,
        blocks=run.blocks,
        num_embedding_parameters=0,
        num_head_parameters=0,
        head_inputs=run.hidden,
        head_outputs=run.vocab,
        tied=run.tied,
        seq_len=run.seq_len,
    )
    one = _layout_of_one(run)
    held = holdings_of(
        _engine(run),
        cluster_of(run),
        one,
        precision=run.precision,
        optimizer=run.stated.optimizer,
        profile=profile,
    )
    held = replace(held, overhead_bytes=run.stated.context_bytes or held.overhead_bytes)
    if not is_adapter(run):
        return held
    frozen = {None: 2.0, 4: 0.53, 8: 1.0}[run.quantized_bits]
    return replace(held, is_frozen=1.0, frozen_bytes=frozen, frozen_block_bytes=frozen)


def _layout_of_one(run: Run) -> Layouts:
    """As much of a layout as `holdings_of` looks at."""
    columns = {each.name: np.ones(1) for each in fields(Layouts)}
    columns["shard"] = np.array([_shard(run)])
    columns["sharding"] = np.array([SHARDINGS.index(run.sharding)])
    return Layouts(**columns)


def _stack(values: Sequence[Any]) -> Any:
    """One dataclass whose fields are columns, of many whose fields are numbers."""
    first = values[0]
    columns: dict[str, Any] = {}
    for each in fields(first):
        entries = [getattr(value, each.name) for value in values]
        if isinstance(entries[0], tuple):
            columns[each.name] = tuple(_stack(level) for level in zip(*entries, strict=True))
        elif is_dataclass(entries[0]):
            columns[each.name] = _stack(entries)
        else:
            columns[each.name] = np.array([np.ravel(entry)[0] for entry in entries], float)
    return type(first)(**columns)

"""What each layout of a table costs: bytes and seconds, with a range, and why.

A table goes in and a table comes out: one call prices a whole search.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from paceline.catalog.efficiencies import Efficiencies, load_efficiencies
from paceline.catalog.engines import Engine, load_engines
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.estimate.compute import selective_flops
from paceline.estimate.engine_memory import (
    holdings_of,
    is_written,
    traffic_of,
)
from paceline.estimate.inputs import Holdings, Model, Traffic
from paceline.estimate.memory import PARTS, fullest, memory_parts
from paceline.estimate.rates import LinkRates, Rates, rates_of
from paceline.estimate.step import TERMS, fast_end, slow_end, step_terms
from paceline.parallel import Layout, Layouts, table_of
from paceline.parallel.word_columns import share_recomputed
from paceline.profile import Block, ModelProfile
from paceline.profile.block import Column
from paceline.topology import Cluster

UNMEASURED = (0.85, 1.5)
"""Range of the bytes with an engine whose peaks were never compared, as a share of the estimate.
Set on five sources of published peaks with what was set for their engines forgotten: it holds 90 %
of a source's rows, and 97 % of 484 rows of a source put away before (nanotron's playbook)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank, at the moment in a step when it is fullest."""

    parts: Mapping[str, int | None]
    """Part -> bytes, in the order people read them; None is unknown."""

    low_bytes: int | None = None
    high_bytes: int | None = None
    """Range of the known parts, where no run's peak with the engine was measured; else None."""

    @property
    def known_bytes(self) -> int:
        """Sum of the parts that are known: at least this much is needed."""
        return sum(part for part in self.parts.values() if part is not None)

    @property
    def total_bytes(self) -> int | None:
        """Sum of all parts: what the driver shows (`nvidia-smi`); None when one is unknown."""
        return None if None in self.parts.values() else self.known_bytes

    @property
    def overhead_bytes(self) -> int:
        """Process or device context, and the libraries' buffers: there before the model."""
        return self.parts["overhead"] or 0

    @property
    def reserved_bytes(self) -> int:
        """Taken from the device by the allocator; of the parts that are known."""
        return self.known_bytes - self.overhead_bytes

    @property
    def allocated_bytes(self) -> int:
        """In living tensors; of the parts that are known."""
        return self.reserved_bytes - (self.parts["slack"] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted costs of one layout. None is unknown, and stays so."""

    memory: MemoryEstimate
    """Memory of the fullest rank."""

    step_s: float | None
    """Seconds of one optimizer step."""

    step_low_s: float | None
    step_high_s: float | None
    """Range that nine of ten steps are expected in; layouts are ranked by its slow end."""

    tokens_per_s: float | None
    """Tokens a second over all ranks; None where a sample is not a row of tokens."""

    mfu: float | None
    """Model FLOPs utilisation: 3 x forward FLOPs (2 x where the model is frozen; causal attention
    halved, recomputation not counted) a second, as a share of the peak of the precision: as
    Megatron-LM counts (training.py, core 0.16). PaLM, arXiv:2204.02311, app. B, does not halve."""

    hfu: float | None
    """Hardware FLOPs utilisation: the same with the FLOPs that are computed again."""

    num_checkpoint_bytes: int
    """Size of one checkpoint on disk."""

    terms: Mapping[str, float]
    """Seconds of the step by term; empty when unknown."""

    known: Literal["estimated"] = "estimated"
    """How these numbers are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is priced: one model on one cluster with one engine."""

    profile: ModelProfile
    cluster: Cluster
    engine: Engine
    precision: str
    optimizer: str
    model: Model
    rates: Rates | None
    replica_share: float = 1.0
    """What compression leaves of the bytes that replicas all-reduce."""

    error_bytes: float = 0.0
    """Bytes of each gradient of replicas that compression carries to the next step."""

    loss_chunk: int = 0
    """Tokens whose logits exist at a time in the loss; 0 is all."""

    efficiencies: Efficiencies = field(default_factory=load_efficiencies)
    """Constants that the rates were worked out with."""

    def again(
        self, *, profile: ModelProfile | None = None, cluster: Cluster | None = None
    ) -> "Case":
        """Another model or cluster with the same engine, precision, optimizer and constants."""
        return case_of(
            profile or self.profile,
            cluster or self.cluster,
            precision=self.precision,
            optimizer=self.optimizer,
            engine=self.engine,
            efficiencies=self.efficiencies,
            replica_share=self.replica_share,
            error_bytes=self.error_bytes,
            loss_chunk=self.loss_chunk,
        )

    def named(self, layout: Layout) -> str:
        """A layout in the engine's words."""
        return layout.named(self.engine.full_sharding)

    @property
    def traffic(self) -> Traffic:
        """Bytes of a parameter on the wire and through the optimizer."""
        return traffic_of(
            self.engine,
            self.cluster,
            precision=self.precision,
            optimizer=self.optimizer,
            replica_share=self.replica_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a table of layouts, one row a layout."""

    case: Case
    layouts: Layouts
    parts: Mapping[str, Column]
    """Part -> bytes; activations are 0 where they are unknown."""

    terms: Mapping[str, Column]
    """Term -> seconds; empty where the time is unknown."""

    @property
    def memory_bytes(self) -> Column:
        """Bytes of the fullest rank."""
        return np.asarray(sum(self.parts.values()))

    @property
    def step_s(self) -> Column:
        """Seconds of a step; NaN where unknown."""
        if not self.terms:
            return np.full(len(self.layouts), np.nan)
        return np.asarray(sum(self.terms.values()))

    def row(self, index: int) -> Estimate:
        """The estimate of one layout."""
        return _estimate(self, index)


def case_of(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    precision: str,
    optimizer: str = "adamw",
    engine: Engine | None = None,
    efficiencies: Efficiencies | None = None,
    replica_share: float = 1.0,
    error_bytes: float = 0.0,
    loss_chunk: int = 0,
) -> Case:
    """A model, a cluster and an engine, ready to price layouts.

    Args:
        profile: Of the model, at the job's sequence length.
        cluster: Where it would run.
        precision: Of the matrix multiplications, decided: not `auto`.
        optimizer: One of `OPTIMIZERS`.
        engine: That runs the step; left out, our own runtime.
        efficiencies: Left out, those that are shipped.
        replica_share: What compression leaves of all-reduced gradients: `compressed_share`.
        error_bytes: Of each such gradient, what is carried to the next step: 4 with PowerSGD.
        loss_chunk: Tokens whose logits exist at a time in the loss; 0 is all.
    """
    engine = engine or load_engines()["paceline"]
    constants = efficiencies or load_efficiencies()
    has_flops = profile.forward_flops_per_sample is not None
    return Case(
        profile=profile,
        cluster=cluster,
        engine=engine,
        precision=precision,
        optimizer=optimizer,
        model=_model(profile, engine),
        rates=rates_of(cluster, engine, precision, constants) if has_flops else None,
        replica_share=replica_share,
        error_bytes=error_bytes,
        loss_chunk=loss_chunk,
        efficiencies=constants,
    )


def price(layouts: Layouts, case: Case) -> Prices:
    """One price for each layout, in the same order."""
    holdings = case_holdings(layouts, case)
    parts = fullest(case.model, layouts, holdings)
    return Prices(case=case, layouts=layouts, parts=parts, terms=case_terms(layouts, case))


def case_terms(layouts: Layouts, case: Case) -> Mapping[str, Column]:
    """Seconds of a step by term, for each layout; none where the case has no rates. Blocks per
    recomputed one are those of the model: of 6 blocks every 4th is one in 3."""
    if case.rates is None:
        return {}
    if np.any(layouts.recompute_every > 1):
        share = share_recomputed(layouts.recompute_every, case.model.num_blocks)
        layouts = replace(layouts, recompute_every=1 / share)
    return step_terms(case.model, layouts, case.rates, case.traffic)


def exchanged_bytes(layout: Layout, case: Case) -> int | None:
    """Bytes that a rank sends in a step for its data ranks: the planner's own seconds, over links
    of one byte a second that start at once and that nothing hides. None where the case has no
    rates."""
    if case.rates is None:
        return None
    link = LinkRates(
        size=inf,
        gather_bytes_per_s=1,
        all_reduce_bytes_per_s=1,
        all_to_all_bytes_per_s=1,
        latency_s=0,
        pair_bytes_per_s=1,
    )
    bare = replace(case.rates, levels=(link,), collective_s=0, gradient_overlap=0, gather_overlap=0)
    traffic = replace(
        case.traffic, host_bytes_per_s=inf, host_memory_bytes_per_s=inf, disk_bytes_per_s=inf
    )
    return round(float(step_terms(case.model, table_of([layout]), bare, traffic)["data"].max()))


def case_holdings(layouts: Layouts, case: Case) -> Holdings:
    """What the case's engine holds for these layouts."""
    holdings = holdings_of(
        case.engine,
        case.cluster,
        layouts,
        precision=case.precision,
        optimizer=case.optimizer,
        profile=case.profile,
    )
    holdings = replace(holdings, loss_chunk=float(case.loss_chunk))
    if not case.error_bytes:
        return holdings
    errors = np.where(layouts.sharding == 0, case.error_bytes, 0.0)
    return replace(holdings, passing_bytes=holdings.passing_bytes + errors)


def price_one(layout: Layout, case: Case) -> Estimate:
    """The price of a single layout."""
    return price(table_of([layout]), case).row(0)


def stage_memory(layout: Layout, case: Case) -> list[MemoryEstimate]:
    """Memory of one rank of every pipeline stage, first to last."""
    table = table_of([layout])
    holdings = case_holdings(table, case)
    is_known = _knows_activations(case.profile)
    return [
        _memory(parts, 0, is_known)
        for parts in memory_parts(case.model, table, holdings, range(layout.pipeline))
    ]


class StateBytes(NamedTuple):
    """Bytes of each trained parameter that one layout keeps."""

    weight: float
    gradient: float
    master: float
    """The float32 copy beside the weight; 0 is none."""

    moments: float
    root_moments: float
    """Moments of a parameter outside the blocks."""


def state_bytes(layout: Layout, case: Case) -> StateBytes:
    """What the case's engine keeps of a parameter in this layout, in its own types."""
    h = case_holdings(table_of([layout]), case)
    weight = h.sharded_bytes if layout.sharding in ("zero2", "full", "hybrid") else h.weight_bytes
    held = (weight, h.gradient_bytes, h.master_bytes, h.moment_bytes, h.root_moment_bytes)
    return StateBytes(*(float(np.max(each)) for each in held))


def checkpoint_bytes(layout: Layout, case: Case) -> int:
    """Bytes of one checkpoint: the widest copy of the parameters, and the optimizer's moments."""
    each, profile = state_bytes(layout, case), case.profile
    trained = profile.num_trained_parameters
    outside = trained * profile.num_root_parameters / max(profile.num_parameters, 1)
    weights = max(each.weight, each.master) * trained
    return round(weights + each.moments * (trained - outside) + each.root_moments * outside)


def _model(profile: ModelProfile, engine: Engine) -> Model:
    at_both_ends = profile.head_inputs * profile.head_outputs if profile.tied else 0
    seq_len = profile.seq_len or 1
    share = 1.0 if profile.head_tokens is None else profile.head_tokens / seq_len
    blocks = profile.blocks
    if profile.outside is not None:
        # Its parameters are those of embedding and head.
        costs = replace(profile.outside, num_parameters=0)
        blocks = (*blocks, Block(name="outside", count=1, hidden=0, measured=costs))
    num_quantised = 0 if profile.adapter is None else profile.adapter.num_quantised_parameters
    in_blocks = profile.num_parameters - profile.num_root_parameters
    return Model(
        blocks=blocks,
        seq_len=seq_len,
        head_inputs=profile.head_inputs,
        head_outputs=profile.head_outputs * share,
        num_embedding_parameters=profile.num_embedding_parameters,
        num_head_parameters=profile.num_head_parameters,
        num_tied_parameters=at_both_ends,
        is_balanced=engine.balances_stages,
        caps_logits=float(profile.caps_logits),
        written=float(is_written(profile, engine)),
        trained_share=profile.num_trained_parameters / max(profile.num_parameters, 1),
        quantised_share=num_quantised / max(in_blocks, 1),
    )


def _knows_activations(profile: ModelProfile) -> bool:
    measured = [block.measured for block in profile.blocks if block.measured is not None]
    return bool(profile.blocks) and all(each.saved_bytes is not None for each in measured)


def _memory(parts: Mapping[str, Column], index: int, knows_activations: bool) -> MemoryEstimate:
    def entry(name: str) -> int | None:
        if name == "activations" and not knows_activations:
            return None
        flat = np.ravel(parts[name])
        return round(float(flat[index if flat.size > 1 else 0]))

    return MemoryEstimate(parts={name: entry(name) for name in PARTS})


def _share_again(layout: Layout, case: Case, forward: float) -> float:
    """FLOPs that the backward pass does again, as a share of the forward pass's."""
    profile = case.profile
    if layout.recompute in WHOLE_BLOCKS:
        return 1 / layout.recompute_every
    is_measured = any(block.measured is not None for block in profile.blocks)
    rates = case.rates
    if layout.recompute == "none" or rates is None or is_measured:
        return 0.0
    again = sum(
        block.count * selective_flops(block, profile.seq_len or 0, rates)
        for block in profile.blocks
    )
    return float(again / forward)


def useful_passes(profile: ModelProfile) -> float:
    """Forward passes whose FLOPs a step's useful work is: 3, or from 2 on where weights are frozen.

    Frozen matrices get no gradient: two passes, and the third for what is trained.
    """
    return 2 + profile.num_trained_parameters / max(profile.num_parameters, 1)


def mfu_at(estimate: Estimate, step_s: float, *, ranks_now: float = 1.0) -> float | None:
    """Share of the ranks' peak that a measured step used; None where the planned one is unknown.

    The same useful FLOPs and the same peak as the estimate's, so that both can be compared.

    Args:
        estimate: Of the plan.
        step_s: As measured.
        ranks_now: Ranks that took the step, as a share of those planned.
    """
    if estimate.mfu is None or estimate.step_s is None or not step_s > 0:
        return None
    return estimate.mfu * estimate.step_s / (step_s * ranks_now)


def _estimate(prices: Prices, index: int) -> Estimate:
    case, layout = prices.case, prices.layouts.row(index)
    profile = case.profile
    terms: dict[str, float] = {}
    for name in TERMS if prices.terms else ():
        flat = np.ravel(prices.terms[name])
        terms[name] = float(flat[index if flat.size > 1 else 0])
    step_s = sum(terms.values()) if terms else None
    within = case.cluster.rates_within
    tokens_per_s = mfu = hfu = None
    if step_s is not None and profile.seq_len is not None:
        tokens_per_s = layout.global_batch * profile.seq_len / step_s
    forward = profile.forward_flops_per_sample
    peak = case.cluster.peak_flops_per_s.get(case.precision)
    if step_s is not None and forward is not None and peak:
        needed = forward * layout.global_batch / (peak * layout.num_ranks * step_s)
        passes = useful_passes(profile)
        mfu = passes * needed
        hfu = (passes + _share_again(layout, case, forward)) * needed
    memory = _memory(prices.parts, index, _knows_activations(profile))
    if not case.engine.has_measured_peaks:
        low, high = (round(end * memory.known_bytes) for end in UNMEASURED)
        memory = replace(memory, low_bytes=low, high_bytes=high)
    return Estimate(
        memory=memory,
        step_s=step_s,
        step_low_s=float(fast_end(terms)) / within if terms else None,
        step_high_s=float(slow_end(terms)) * within if terms else None,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        hfu=hfu,
        num_checkpoint_bytes=checkpoint_bytes(layout, case),
        terms=terms,
    )

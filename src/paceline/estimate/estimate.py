"""What each layout of a batch costs: bytes and seconds.

A batch goes in and a batch comes out, so that a whole search can be priced in one call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.estimate.memory import MemoryEstimate, checkpoint_bytes, estimate_memory
from paceline.estimate.time import step_terms
from paceline.parallel import Layout
from paceline.profile import ModelProfile
from paceline.spec import TrainSpec
from paceline.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted costs of one layout. None is unknown, and stays so."""

    memory: MemoryEstimate
    """Of the fullest rank."""

    step_s: float | None
    """Seconds of one optimizer step."""

    tokens_per_s: float | None
    """Tokens a second over all ranks; None where a sample is not a row of tokens."""

    num_checkpoint_bytes: int
    """Bytes of one checkpoint: parameters and optimizer state in float32."""

    terms: Mapping[str, float]
    """What `step_s` is the sum of, in seconds; empty when it is unknown."""

    known: Literal["estimated"] = "estimated"
    """How these numbers are known."""


def estimate(
    layouts: Sequence[Layout],
    profile: ModelProfile,
    cluster: Cluster,
    train: TrainSpec,
    seq_len: int | None,
) -> list[Estimate]:
    """One estimate for each layout, in the same order.

    Args:
        layouts: To be priced; each has as many ranks as the cluster.
        profile: Of the model, at the job's sequence length.
        cluster: Where it would run.
        train: With its precision decided: `auto` is the planner's to resolve before.
        seq_len: Tokens in one sample; None when a sample is not a row of tokens.
    """
    return [_estimate(layout, profile, cluster, train, seq_len) for layout in layouts]


def _estimate(
    layout: Layout,
    profile: ModelProfile,
    cluster: Cluster,
    train: TrainSpec,
    seq_len: int | None,
) -> Estimate:
    assert train.precision != "auto", "the planner decides the precision first"
    memory = estimate_memory(
        layout, profile, cluster, precision=train.precision, optimizer=train.optimizer
    )
    terms = step_terms(
        layout, profile, cluster, precision=train.precision, optimizer=train.optimizer
    )
    step_s = sum(terms.values()) if terms is not None else None
    tokens_per_s = None
    if step_s is not None and seq_len is not None:
        tokens_per_s = layout.global_batch * seq_len / step_s
    return Estimate(
        memory=memory,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        num_checkpoint_bytes=checkpoint_bytes(profile, train.optimizer),
        terms=terms or {},
    )

"""Degrees that ranks, a model and a job allow."""

from dataclasses import replace
from functools import cache
from math import gcd, isqrt, prod

from paceline.choices.pipeline_schedules import LOOPED, PLAIN
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.job import LayoutSpec
from paceline.profile import ModelProfile
from paceline.profile.adapter import unquantisable


def with_implied(fixed: LayoutSpec) -> LayoutSpec:
    """What is fixed, with what follows from it: chunks are of the interleaved schedule, groups of
    hybrid sharding, every how many blocks one is recomputed of full recompute, and offloaded
    parameters of an offloaded optimizer.

    >>> with_implied(LayoutSpec(recompute_every=4)).recompute
    'full'
    """
    if fixed.offload == "auto" and fixed.offload_parameters is True:
        fixed = replace(fixed, offload="cpu" if fixed.offload_path is None else "nvme")
    if fixed.schedule == "auto" and fixed.chunks not in ("auto", 1):
        fixed = replace(fixed, schedule=LOOPED[0])
    if fixed.sharding == "auto" and fixed.shard != "auto":
        fixed = replace(fixed, sharding="hybrid")
    if fixed.recompute == "auto" and fixed.recompute_every not in ("auto", 1):
        fixed = replace(fixed, recompute=WHOLE_BLOCKS[0])
    return fixed


def asks_for_pipeline(fixed: LayoutSpec) -> bool:
    """Whether what is fixed has a meaning in a pipeline alone."""
    return with_implied(fixed).schedule not in ("auto", PLAIN)


_LARGEST = 10**12
"""A million trial divisions are some 50 ms; no number of ranks, samples or columns is larger."""


def divisors(number: int) -> list[int]:
    """Every divisor, largest first.

    Raises:
        ValueError: The number is so large that looking would take long.

    >>> divisors(12)
    [12, 6, 4, 3, 2, 1]
    """
    return list(_divisors(number))


@cache
def _divisors(number: int) -> tuple[int, ...]:
    if number > _LARGEST:
        raise ValueError(f"the divisors of {number} are not looked for; {_LARGEST} is the most")
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}, reverse=True))


def divides_model(profile: ModelProfile, tensor: int, *, copies_kv_head: bool = True) -> bool:
    """Whether every rank gets as many heads, keys and values, and columns as every other.

    `copies_kv_head`: the only key and value head of a model may be held by all of them.
    """
    return all(
        block.heads % tensor == 0
        and (block.kv_heads % tensor == 0 or (copies_kv_head and block.kv_heads == 1))
        and block.cross_heads % tensor == 0
        and block.ffn % tensor == 0
        and block.shared_ffn % tensor == 0
        for block in profile.blocks
    ) and (tensor == 1 or not unquantisable(profile, tensor))


def num_experts(profile: ModelProfile) -> int:
    """What expert degrees must divide: routed experts of all kinds of blocks; 1 when none has."""
    return gcd(*(block.experts for block in profile.blocks)) or 1


def num_fixed_ranks(fixed: LayoutSpec) -> int:
    """Product of the degrees that the job fixed."""
    degrees = (fixed.data, fixed.tensor, fixed.pipeline, fixed.context)
    return prod(1 if each == "auto" else each for each in degrees)

"""Seconds of one operation and of one collective, by the planner's own rates and functions.

So planner and proof speak the same rates, and differ only in what is issued and when.
"""

from collections.abc import Callable
from functools import cache
from math import inf

from paceline.estimate.collectives import all_gather_s, all_reduce_s, all_to_all_s, p2p_s
from paceline.estimate.compute import grouped_s, matmul_s
from paceline.estimate.rates import Rates
from paceline.prove.collectives import Issued
from paceline.prove.proof import HostRates
from paceline.prove.trace import LINK_COPY, Operation


def operation_seconds(
    rates: Rates | None, host: HostRates | None = None
) -> Callable[[Operation], float]:
    """How long each operation takes; 0 without rates."""
    if rates is None:
        return lambda _: 0.0
    return lambda operation: _seconds(operation, rates, host)


def _seconds(operation: Operation, rates: Rates, host: HostRates | None) -> float:
    if host is not None and operation.name == LINK_COPY:
        return operation.num_bytes / host.link_bytes_per_s
    if host is not None and operation.stream == "host":
        return operation.num_bytes / host.state_bytes_per_s
    by_memory = operation.num_bytes / float(rates.memory_bytes_per_s)
    if length := operation.attention_len:
        half_len = float(rates.attention_half_len)
        rate = float(rates.attention_flops_per_s) * length / (length + half_len)
        rate *= float(rates.attention_backward) if operation.is_backward else 1.0
        return max(operation.flops / rate, by_memory)
    if operation.matmul is not None:
        rows, inner, columns, count = operation.matmul
        if count == 1:
            return float(matmul_s(rows, inner, columns, rates.matmul))
        return float(grouped_s(rows, inner, columns, count, rates.matmul, rates))
    by_compute = operation.flops / float(rates.matmul.flops_per_s)
    return max(by_compute, by_memory)


def collective_seconds(rates: Rates | None, stage_ranks: int) -> Callable[[Issued], float]:
    """How long each collective takes once all ranks are there; 0 without rates.

    Args:
        rates: The cluster's.
        stage_ranks: Ranks of one pipeline stage, which follow each other.
    """
    if rates is None:
        return lambda _: 0.0

    @cache
    def seconds(issued: Issued) -> float:
        ranks = sorted(issued.ranks)
        degree, stride = len(ranks), ranks[1] - ranks[0]
        if issued.kind in ("send", "receive"):
            shared = (
                level.size
                for level in rates.levels
                if ranks[0] // level.size == ranks[1] // level.size
            )
            # Of pipeline stages and rings, as many ranks send at once as lie between the two; in a
            # loop from the last stage to the first, those of a stage.
            span, crossing = next(shared, inf), min(stride, stage_ranks)
            return float(p2p_s(issued.num_bytes, span, rates, crossing=crossing))
        collective = _COLLECTIVES.get(issued.kind, all_gather_s)
        return float(collective(issued.num_bytes, degree, stride, rates))

    return seconds


_COLLECTIVES = {"all-to-all": all_to_all_s, "all-reduce": all_reduce_s}
"""All others are priced as an all-gather."""

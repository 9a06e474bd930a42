"""A collective that takes a large part of the step, and what would make it shorter.

Leaves out: what the search has already weighed, other layouts; and tensor ranks on several nodes,
which `caution.py` warns of.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from paceline.estimate import Case, Estimate
from paceline.parallel import Layout
from paceline.plan.choose import choose
from paceline.plan.decision import Caution
from paceline.plan.search import search
from paceline.plan.search_inputs import Asked, case_of_asked, clashes, space_of
from paceline.units import format_seconds

MOST_OF_STEP = 0.25
"""Share of a step that one kind of collective may take without a word. A choice."""

_EXCHANGES: tuple[dict[str, Any], ...] = (
    {"token_dispatcher": "deepep"},
    {"async_expert": True},
    {"token_dispatcher": "deepep", "async_expert": True},
)


def collective_shares(
    asked: Asked, case: Case, layout: Layout, price: Estimate, *, limit_bytes: int
) -> Iterator[Caution]:
    """Each kind of collective with a large part of the step.

    Args:
        asked: What the plan was made of.
        case: What it was priced with.
        layout: The chosen one.
        price: Its estimate.
        limit_bytes: Of a rank.
    """
    cluster = case.cluster
    if cluster.backend == "gloo" or not price.step_s:
        return
    inside = {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.tensor * layout.expert,
        "data": cluster.num_ranks,
    }
    for name, span in inside.items():
        seconds, is_inside = price.terms[name], span <= cluster.domain
        if seconds <= MOST_OF_STEP * price.step_s or (name == "tensor" and not is_inside):
            continue
        where = "inside a node" if is_inside else "between nodes"
        fixes = [*_fixes(name, asked, layout, price, limit_bytes)]
        if not is_inside:
            fixes.append("take a faster network (cluster.network)")
        elif not fixes:
            fixes.append(f"take accelerators with more memory: {_WITH_MORE[name]}")
        yield Caution(
            about="collective",
            what=f"{_WHAT[name]} {where} takes {format_seconds(seconds)} of a step of "
            f"{format_seconds(price.step_s)} ({seconds / price.step_s:.0%})",
            fix="; or ".join(fixes),
        )


_WHAT = {
    "tensor": "the sum of each block over tensor ranks",
    "context": "the exchange of keys and values over context ranks",
    "expert": "the exchange of tokens with their experts",
    "data": "the gathering of parameters and reduction of gradients",
}


def _fixes(
    name: str, asked: Asked, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[str]:
    """What the search could not change itself."""
    train = asked.job.spec.train
    if name == "expert":
        found = (_exchanged(asked, each, limit_bytes) for each in _EXCHANGES)
        step_s, changed = min(filter(None, found), default=(inf, ""))
        if step_s * (1 + asked.job.spec.plan.simpler_margin) < (price.step_s or 0.0):
            yield f"set {changed}: {format_seconds(step_s)} a step, estimated"
    elif name == "data" and layout.sharding in ("none", "zero1"):
        yield f"raise train.global_batch ({train.global_batch}): as many bytes for more samples"
    else:
        yield f"take accelerators with more memory: {_WITH_MORE[name]}"


_WITH_MORE = {
    "tensor": "fewer of them hold a layer",
    "context": "fewer of them hold a sample",
    "expert": "fewer of them share the experts",
    "data": "larger micro-batches gather less often",
}


def _exchanged(asked: Asked, changes: dict[str, Any], limit_bytes: int) -> tuple[float, str] | None:
    """Seconds of a step with another exchange, and what asks for it; None where it cannot be."""
    spec = asked.job.spec
    job = replace(asked.job, spec=replace(spec, train=replace(spec.train, **changes)))
    other = replace(asked, job=job)
    space = space_of(job, asked.cluster, asked.profile)
    if job == asked.job or clashes(job, asked.cluster, space):
        return None
    case, margin = case_of_asked(other), spec.plan.simpler_margin
    found = choose(
        search(space, case, limit_bytes=limit_bytes, margin=margin),
        case,
        limit_bytes=limit_bytes,
        margin=margin,
    )
    if found is None or found.estimate.step_s is None:
        return None
    words = (f"train.{name} to {str(value).lower()}" for name, value in changes.items())
    return found.estimate.step_s, " and ".join(words)

"""A collective that takes a large part of the step, and what would make it shorter.

Leaves out: what the search has already weighed, other layouts; and tensor ranks on several nodes,
which `caution.py` warns of.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import inf
from typing import Any

from paceline.estimate import Case, Estimate
from paceline.parallel import Layout
from paceline.plan.choose import best_of
from paceline.plan.decision import Caution
from paceline.plan.expert_exchange import asked_of
from paceline.plan.search_inputs import Asked, case_of_asked, clashes, space_of
from paceline.units import format_seconds

MOST_OF_STEP = 0.25
"""Share of a step that one kind of collective may take without a word. A choice."""

_ASKED: dict[str, Any] = {"token_dispatcher": "deepep", "async_expert": True}


def collective_shares(
    asked: Asked, case: Case, layout: Layout, price: Estimate, *, limit_bytes: int
) -> Iterator[Caution]:
    """Each kind of collective with a large part of the step, and an exchange of tokens that the
    job asks for and that makes the step longer.

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
    train = asked.job.spec.train
    if shorter := _shorter(asked_of(train), asked, price.step_s, limit_bytes):
        step_s, changes = shorter
        yield Caution(
            about="collective",
            what="with "
            + " and ".join(f"train.{name} {str(getattr(train, name)).lower()}" for name in changes)
            + f" a step takes {format_seconds(price.step_s)}, without {format_seconds(step_s)}",
            fix=f"set {_words(changes)}",
        )
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
    train, fixed = asked.job.spec.train, asked.job.spec.layout
    if name in ("tensor", "context") and getattr(fixed, name) != "auto":
        yield f"leave layout.{name} at auto, which the search weighs"
    elif name == "expert":
        if shorter := _shorter(_ASKED, asked, price.step_s or 0.0, limit_bytes):
            step_s, changes = shorter
            yield f"set {_words(changes)}: {format_seconds(step_s)} a step, estimated"
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


def _shorter(
    changes: dict[str, Any], asked: Asked, step_s: float, limit_bytes: int
) -> tuple[float, dict[str, Any]] | None:
    """The shortest step with some of these changes of the exchange, and which; None where none is
    shorter by `plan.simpler_margin`."""
    some = [
        dict(each)
        for count in range(1, len(changes) + 1)
        for each in combinations(changes.items(), count)
    ]
    found = [(_exchanged(asked, each, limit_bytes), each) for each in some]
    least, chosen = min(found, key=lambda each: each[0], default=(inf, {}))
    return (least, chosen) if least * (1 + asked.job.spec.plan.simpler_margin) < step_s else None


def _words(changes: dict[str, Any]) -> str:
    return " and ".join(f"train.{name} to {str(to).lower()}" for name, to in changes.items())


def _exchanged(asked: Asked, changes: dict[str, Any], limit_bytes: int) -> float:
    """Seconds of a step with another exchange; infinite where it cannot be, or is the job's."""
    spec = asked.job.spec
    job = replace(asked.job, spec=replace(spec, train=replace(spec.train, **changes)))
    other = replace(asked, job=job)
    space = space_of(job, asked.cluster, asked.profile)
    if job == asked.job or clashes(job, asked.cluster, space):
        return inf
    margin = spec.plan.simpler_margin
    found = best_of(space, case_of_asked(other), limit_bytes=limit_bytes, margin=margin)
    return inf if found is None else found.estimate.step_s or inf

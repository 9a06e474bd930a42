"""A plan as one readable screen of plain text."""

import textwrap
from collections.abc import Iterator, Sequence

from paceline.parallel import Layout
from paceline.plan import Decision, Plan, Rejected
from paceline.plan.choose import HEAD_ROOM, limit_bytes
from paceline.units import format_bytes, format_count, format_flops_per_s, format_seconds

_WIDTH = 96
_BAR_WIDTH = 30
_NUM_OTHERS = 5
"""Layouts listed besides the chosen one; `--json` has them all."""


def format_plan(plan: Plan) -> str:
    """The layout and why, the batch, memory by part, time, the other layouts, and decisions."""
    return "\n".join(
        (
            *_headline(plan),
            *_memory(plan),
            *_time(plan),
            *_others(plan),
            *_decisions(plan),
        )
    )


def _row(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _headline(plan: Plan) -> Iterator[str]:
    cluster, layout, profile = plan.cluster, plan.layout, plan.profile
    place = "this machine" if cluster.is_local else "declared, not this machine"
    yield _row("layout", layout.name)
    yield _row("on", f"{cluster.name} ({place}, {cluster.backend})")
    reasons = [each.reason for each in plan.decisions if each.field == "layout.sharding"]
    yield _row("why", reasons[0] if reasons else "fixed by the job")
    yield _row("batch", _batch_equation(layout))
    yield _row(
        "model",
        f"{format_count(profile.num_parameters)} parameters "
        f"({profile.num_parameters:,}), {_blocks(profile.num_blocks)}, {plan.precision}",
    )


def _blocks(num_blocks: int) -> str:
    return f"{num_blocks} block{'' if num_blocks == 1 else 's'}"


def _batch_equation(layout: Layout) -> str:
    return (
        f"{layout.micro_batch} a micro-batch x {layout.accumulation} accumulated "
        f"x {layout.data} rank{'s' if layout.data > 1 else ''} "
        f"= {layout.global_batch} samples a step"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory, cluster = plan.estimate.memory, plan.cluster
    limit = limit_bytes(cluster.usable_bytes)
    total = memory.total_bytes
    amount = format_bytes(total) if total is not None else f"{format_bytes(memory.known_bytes)} + ?"
    source = cluster.known.get("usable_bytes", "cited")
    yield ""
    yield _row("memory", f"{amount} on the fullest rank, estimated")
    largest = max(part or 0 for part in memory.parts.values())
    for name, size in memory.parts.items():
        if size is None:
            yield f"  {name:<14}{'unknown':>10}"
            continue
        if size:
            bar = "#" * max(1, round(_BAR_WIDTH * size / largest))
            yield f"  {name:<14}{format_bytes(size):>10}  {bar}"
    yield (
        f"  {'may be used':<14}{format_bytes(limit):>10}  "
        f"{1 - HEAD_ROOM:.0%} of {format_bytes(cluster.usable_bytes)} a rank ({source})"
    )


def _time(plan: Plan) -> Iterator[str]:
    price, cluster = plan.estimate, plan.cluster
    yield ""
    if price.step_s is None:
        yield _row("time", "unknown for this model or accelerator")
    else:
        rate = (
            f", {format_count(price.tokens_per_s)} tokens/s"
            if price.tokens_per_s is not None
            else ""
        )
        yield _row("time", f"{format_seconds(price.step_s)} a step{rate}, estimated")
        terms = ", ".join(f"{name} {format_seconds(term)}" for name, term in price.terms.items())
        yield _row("", terms)
        peak, share = (
            cluster.peak_flops_per_s[plan.precision],
            cluster.compute_efficiency[plan.precision],
        )
        yield _row(
            "",
            f"at {share:.0%} of {format_flops_per_s(peak)} a rank (peak "
            f"{cluster.known.get('peak_flops_per_s', 'cited')}, share "
            f"{cluster.known.get('compute_efficiency', 'estimated')})",
        )
    yield _row(
        "checkpoint",
        f"{format_bytes(price.num_checkpoint_bytes)} every {_steps(plan.checkpoint_every)}; "
        f"evaluation every {_steps(plan.evaluate_every)}",
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _others(plan: Plan) -> Iterator[str]:
    if not plan.rejected:
        return
    yield ""
    yield _row("others", f"{len(plan.rejected)} considered")
    for each in _most_telling(plan.rejected)[:_NUM_OTHERS]:
        yield f"  {_short(each.layout):<30}{each.reason}"
    hidden = len(plan.rejected) - _NUM_OTHERS
    if hidden > 0:
        yield f"  and {hidden} more: paceline plan --json"


def _most_telling(rejected: Sequence[Rejected]) -> list[Rejected]:
    """The best of each way to split first, then the rest."""
    best = {
        (each.layout.name, each.layout.reduce_every_micro_batch): each for each in rejected[::-1]
    }
    firsts = [each for each in rejected if each in best.values()]
    return firsts + [each for each in rejected if each not in firsts]


def _short(layout: Layout) -> str:
    way = layout.name.split(" over ")[0]
    each = ", reduce each" if layout.reduce_every_micro_batch else ""
    return f"{way} {layout.micro_batch} x {layout.accumulation}{each}"


def _decisions(plan: Plan) -> Iterator[str]:
    shown: list[Decision] = [each for each in plan.decisions if each.field != "layout.sharding"]
    if not shown:
        return
    yield ""
    yield "decided"
    for each in shown:
        yield from textwrap.wrap(
            f"{each.field} = {each.value}: {each.reason}",
            width=_WIDTH,
            initial_indent="  ",
            subsequent_indent="      ",
        )

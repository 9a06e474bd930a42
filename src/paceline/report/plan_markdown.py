"""A plan as Markdown, for a pull request or a wiki."""

from collections.abc import Iterator

from paceline.catalog.price import price_day
from paceline.estimate import PART_NAMES, TERM_NAMES
from paceline.plan import Plan
from paceline.units import bytes_apart, format_amount, format_bytes, format_count, format_seconds


def plan_markdown(plan: Plan) -> str:
    """The layout, memory and time by part, the others, and decisions, as tables."""
    return "\n".join((*_head(plan), *plan_tables(plan), *_others(plan), *_decisions(plan))) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    layout, price = plan.layout, plan.estimate
    yield f"## {plan.layout_name} on {plan.cluster.name}\n"
    yield (
        f"{plan.profile.name}, {format_count(plan.profile.num_parameters)} parameters, "
        f"{plan.precision}, {plan.engine_name}; {layout.micro_batch} a micro-batch x "
        f"{layout.accumulation} accumulated x {layout.data} = {layout.global_batch} samples a "
        f"step; recompute {layout.recompute}.\n"
    )
    rate = "" if price.tokens_per_s is None else f", {format_count(price.tokens_per_s)} tokens/s"
    mfu = "" if price.mfu is None else f", MFU {price.mfu:.1%}"
    seconds = "unknown" if price.step_s is None else format_seconds(price.step_s)
    yield f"Estimated: {seconds} a step{rate}{mfu}, {_memory(plan)} on the fullest rank."
    if plan.cost is not None:
        yield (
            f"${format_amount(plan.cost.usd)} at {plan.cost.provider}, {plan.cost.way} "
            f"(price of {price_day(plan.cost.as_of)})."
        )
    for each in plan.cautions:
        yield f"\n**Warning ({each.about}):** {each.what}. Fix: {each.fix}."
    yield ""


def _memory(plan: Plan) -> str:
    memory = plan.estimate.memory
    more = "" if memory.total_bytes is not None else " + ?"
    needs, limit = bytes_apart(memory.known_bytes, plan.limit_bytes)
    return f"{needs}{more} of {limit}"


def plan_tables(plan: Plan) -> Iterator[str]:
    """Memory of the fullest rank and time of a step by part, as tables."""
    yield "| memory | a rank |\n| --- | ---: |"
    for name, size in plan.estimate.memory.parts.items():
        if size != 0:
            shown = "unknown" if size is None else format_bytes(size)
            yield f"| {PART_NAMES.get(name, name)} | {shown} |"
    yield ""
    if plan.estimate.terms:
        yield "| time | a step |\n| --- | ---: |"
        for name, seconds in plan.estimate.terms.items():
            if seconds:
                yield f"| {TERM_NAMES.get(name, name)} | {format_seconds(seconds)} |"
        yield ""


def _others(plan: Plan) -> Iterator[str]:
    if not plan.rejected:
        return
    yield "| other layout | batch | a step | memory | why it lost |"
    yield "| --- | --- | ---: | ---: | --- |"
    for each in plan.rejected:
        seconds = each.estimate.step_s
        layout = each.layout
        yield (
            f"| {plan.named(layout)} | {layout.micro_batch} x {layout.accumulation} | "
            f"{'unknown' if seconds is None else format_seconds(seconds)} | "
            f"{format_bytes(each.estimate.memory.known_bytes)} | {each.why} |"
        )
    yield ""


def _decisions(plan: Plan) -> Iterator[str]:
    for each in plan.decisions:
        yield f"- `{each.field}` = {each.value}: {each.reason}"

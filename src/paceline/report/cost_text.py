"""A bill as text: providers side by side, then what is assumed, unknown and impossible."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from paceline.catalog import load_providers
from paceline.estimate.cost import RunCost
from paceline.estimate.serving import BreakEven, Load, Serving
from paceline.plan.bill import Bill
from paceline.report.plan_text import format_amount
from paceline.report.table import format_table
from paceline.units import format_bytes, format_seconds

_WIDTH = 80
_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("COMPUTE", ("training",)),
    ("IDLE", ("idle",)),
    ("SAVES", ("saving",)),
    ("FAILURES", ("lost", "restart")),
    ("STORAGE", ("storage",)),
    ("EGRESS", ("egress",)),
)
"""Column -> the terms of a cost that it adds up."""


def format_bill(bill: Bill, *, most: int | None = None) -> str:
    """A bill for people; `most` rows of costs, all when left out."""
    return "\n".join(_lines(bill, most))


def _lines(bill: Bill, most: int | None) -> Iterator[str]:
    time = "an unknown time" if bill.train_s is None else format_seconds(bill.train_s)
    yield from _labelled(
        "run", f"{bill.name}: {time} on {bill.num_accelerators} x {bill.accelerator}, no failure"
    )
    for line in bill.basis:
        yield from _labelled("", line)
    shown = bill.costs[:most]
    yield ""
    if not shown:
        yield from _labelled("cost", "unknown: no machine with a price is known to run it")
    else:
        yield format_table([*_table(shown)])
        yield "Dollars. COMPUTE, SAVES (of checkpoints) and FAILURES are time on the machines."
        if len(shown) < len(bill.costs):
            yield f"{len(bill.costs) - len(shown)} more rows with --all."
        yield ""
        yield format_table([*_machines(shown)])
    yield ""
    for label, text in _remarks(bill, shown):
        yield from _labelled(label, text)


def _table(costs: Sequence[RunCost]) -> Iterator[tuple[str, ...]]:
    columns = [
        (head, terms)
        for head, terms in _COLUMNS
        if any(term in cost.terms for cost in costs for term in terms)
    ]
    yield ("PROVIDER", "PAID", "TOTAL", "HOURS", *(head for head, _ in columns))
    for cost in costs:
        yield (
            cost.provider + _mark(cost),
            cost.way,
            format_amount(cost.usd),
            f"{cost.hours:.3g}",
            *(_amount(cost, terms) for _, terms in columns),
        )


def _mark(cost: RunCost) -> str:
    return "" if cost.runs_as_planned else "?"


def _amount(cost: RunCost, terms: tuple[str, ...]) -> str:
    """What is counted; `-` is unknown or not there."""
    known = [cost.terms[term] for term in terms if term in cost.terms]
    return format_amount(sum(known)) if known else "-"


def _machines(costs: Sequence[RunCost]) -> Iterator[tuple[str, ...]]:
    yield ("PROVIDER", "MACHINES", "$/H EACH", "PRICE OF", "RENDER --for")
    known = load_providers()
    for cost in costs:
        provider = known.get(cost.provider)
        yield (
            cost.provider,
            f"{cost.num_instances} x {cost.instance}{', spot' if cost.way == 'spot' else ''}",
            f"{cost.per_instance_hour_usd:.2f}",
            cost.as_of,
            "torchrun, slurm" if provider is None else provider.render,
        )


def _remarks(bill: Bill, shown: Sequence[RunCost]) -> Iterator[tuple[str, str]]:
    keeping = bill.keeping
    if keeping.stored_bytes or keeping.sent_bytes:
        stored, sent = format_bytes(keeping.stored_bytes), format_bytes(keeping.sent_bytes)
        yield "kept", f"{stored} on object storage for the whole run; {sent} sent out once"
    yield from _unknown(shown)
    if bill.spot_unpriced:
        yield "", f"spot prices of {', '.join(bill.spot_unpriced)}"
    for provider, why in bill.refused:
        yield "cannot run", f"{provider}: {why}"
    yield (
        "not counted",
        "CPUs and memory billed apart, block storage, requests, taxes, support, discounts",
    )


def _unknown(costs: Iterable[RunCost]) -> Iterator[tuple[str, str]]:
    of_machine: dict[str, set[str]] = {}
    prices: set[str] = set()
    for cost in costs:
        for text in cost.unknown:
            if "price" in text:
                prices.add(text)
            else:
                of_machine.setdefault(text, set()).add(cost.provider)
    label = "unknown"
    for text, providers in sorted(of_machine.items()):
        yield label, f"{text} (?): {', '.join(sorted(providers))}; listed after the others"
        label = ""
    for what in ("storage", "traffic out"):
        names = sorted(each.split("'s price")[0] for each in prices if each.endswith(what))
        if names:
            yield label, f"price of {what}, not in the total: {', '.join(names)}"
            label = ""


def format_serving(
    costs: Sequence[Serving], load: Load, even: BreakEven | None, accelerator: str
) -> str:
    """What answering requests costs, for people."""
    return "\n".join(_serving(costs, load, even, accelerator))


def _serving(
    costs: Sequence[Serving], load: Load, even: BreakEven | None, accelerator: str
) -> Iterator[str]:
    yield from _labelled(
        "load",
        f"{load.requests_per_day:,.0f} requests a day of {format_seconds(load.latency_s)} each, "
        f"{load.concurrency} at once on a machine, on {accelerator}",
    )
    yield ""
    rows = [("PROVIDER", "BILLED", "$/DAY", "$/MONTH", "$/1000 REQ", "BUSY", "PRICE OF")]
    for cost in costs:
        on = "by request" if cost.serverless else f"always, {cost.num_instances} x {cost.instance}"
        rows.append(
            (
                cost.provider,
                on,
                format_amount(cost.usd_per_day),
                format_amount(cost.usd_per_day * 365 / 12),
                f"{cost.usd_per_1000_requests:.3g}",
                "-" if cost.busy is None else f"{cost.busy:.1%}",
                cost.as_of,
            )
        )
    yield format_table(rows)
    yield ""
    if even is None:
        text = "unknown: it needs a price of both kinds, and the catalog has none of one"
    elif even.busy > 1:
        text = (
            f"none: {even.serverless} by request costs less than {even.always_on} always on, up "
            "to the most that one machine answers"
        )
    else:
        text = (
            f"{even.requests_per_day:,.0f} requests a day, {even.busy:.0%} of one machine's time: "
            f"below it {even.serverless} by request costs less, above it {even.always_on} always on"
        )
    yield from _labelled("break-even", text)
    yield from _labelled(
        "not counted", "cold starts, peaks, CPUs and memory billed apart, requests, traffic"
    )


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, width=_WIDTH, initial_indent=f"{label:<12}", subsequent_indent=" " * 12
    )

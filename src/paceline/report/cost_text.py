"""A bill as text: providers side by side, then what is assumed, unknown and impossible."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.catalog import load_accelerators, load_providers
from paceline.estimate.cost import RunCost, accelerator_hours
from paceline.estimate.serving import BreakEven, Load, Serving
from paceline.plan.bill import Bill
from paceline.report.plan_text import machines_of
from paceline.report.table import format_table, wrapped
from paceline.units import format_amount, format_bytes, format_seconds

_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("COMPUTE", ("training",)),
    ("IDLE", ("idle",)),
    ("CKPT", ("saving", "copies")),
    ("FAILURES", ("lost", "restart")),
    ("STORAGE", ("storage",)),
    ("EGRESS", ("egress",)),
)
"""Column -> the terms of a cost that it adds up."""

_FULL_NAMES = {"do": "DigitalOcean", "oci": "Oracle Cloud", "sky": "SkyPilot"}
"""Short names of the tables."""

_KEPT = 5
"""Columns from the start that a narrow terminal still has: up to COMPUTE."""


def format_bill(bill: Bill) -> str:
    """A bill for people."""
    return "\n".join(_lines(bill))


def _lines(bill: Bill) -> Iterator[str]:
    yield from _labelled("run", _run(bill))
    yield from _labelled("cost", _answer(bill))
    yield ""
    if bill.costs:
        yield format_table([*_table(bill.costs)], keep=_KEPT)
        note = (
            "Dollars, except HOURS. TOTAL adds up the columns after HOURS; CKPT and FAILURES are "
            "the cost of the time spent on saving and after failures; - is unknown."
        )
        if not all(cost.runs_as_planned for cost in bill.costs):
            note += " A ? behind a provider: see unknown (?) below."
        yield from wrapped("", note)
        yield ""
        yield format_table([*_machines(bill)])
        yield "paceline render JOB --for RENDER writes the files that start the run there."
        if any(cost.as_of.startswith("by ") for cost in bill.costs):
            yield "PRICE DATE <=: the price is of that day or older."
        names = {cost.provider for cost in bill.costs} & set(_FULL_NAMES)
        if any(_files(cost, bill) == "sky" for cost in bill.costs):
            names.add("sky")
        if names:
            yield from wrapped(
                "", "; ".join(f"{each}: {_FULL_NAMES[each]}" for each in sorted(names))
            )
        yield ""
    label = "basis"
    for line in bill.basis:
        yield from _labelled(label, line)
        label = ""
    for label, text in _remarks(bill):
        yield from _labelled(label, text)


def _run(bill: Bill) -> str:
    on = f"on {bill.num_accelerators} x {bill.accelerator}"
    if bill.train_s is None:
        return f"{bill.name}: an unknown time {on}"
    hours = accelerator_hours(bill.num_accelerators, bill.train_s)
    return (
        f"{bill.name}: {format_seconds(bill.train_s)} {on} without a failure, "
        f"{hours:,.{0 if hours >= 100 else 1}f} accelerator-hours"
    )


def _answer(bill: Bill) -> str:
    """The cheapest of each way, or why there is none."""
    if bill.why_no_cost is not None:
        return f"unknown: {bill.why_no_cost}"
    known, unknown = (
        [cost for cost in bill.costs if cost.runs_as_planned is is_known]
        for is_known in (True, False)
    )
    best = _best(known or unknown)
    if known:
        less = [
            cost
            for cost in _best(unknown)
            if any(cost.usd < other.usd for other in best if other.way == cost.way)
        ]
        lead = f"from {_priced(best)}"
        return f"{lead}; cheaper, with open questions (?): {_priced(less)}" if less else lead
    lacking = sorted({each for cost in best for each in cost.unknown_facts})
    return (
        f"unknown: no machine with a price is known to run this as planned; {_priced(best)}, if "
        f"{' and '.join(lacking)} would do"
    )


def _best(costs: Iterable[RunCost]) -> list[RunCost]:
    """The first of each way to pay."""
    best: dict[str, RunCost] = {}
    for cost in costs:
        best.setdefault(cost.way, cost)
    return [*best.values()]


def _priced(costs: Iterable[RunCost]) -> str:
    return " or ".join(
        f"${format_amount(cost.usd)} {cost.way} at {cost.provider}" for cost in costs
    )


def _table(costs: Sequence[RunCost]) -> Iterator[tuple[str, ...]]:
    columns = [
        (head, terms)
        for head, terms in _COLUMNS
        if any(term in cost.terms for cost in costs for term in terms)
    ]
    yield ("PROVIDER", "PRICING", "TOTAL", "HOURS", *(head for head, _ in columns))
    for cost in costs:
        yield (
            cost.provider + ("" if cost.runs_as_planned else "?"),
            cost.way,
            format_amount(cost.usd),
            f"{cost.hours:,.0f}" if cost.hours >= 100 else f"{cost.hours:.3g}",
            *(_amount(cost, terms) for _, terms in columns),
        )


def _amount(cost: RunCost, terms: tuple[str, ...]) -> str:
    """What is counted; `-` is unknown or not there."""
    known = [cost.terms[term] for term in terms if term in cost.terms]
    return format_amount(sum(known)) if known else "-"


def _machines(bill: Bill) -> Iterator[tuple[str, ...]]:
    yield ("PROVIDER", "MACHINES", "$/H EACH", "PRICE DATE", "RENDER")
    for cost in bill.costs:
        yield (
            cost.provider,
            f"{machines_of(cost)}{', spot' if cost.way == 'spot' else ''}",
            f"{cost.per_instance_hour_usd:.2f}",
            cost.as_of.replace("by ", "<= "),
            _files(cost, bill),
        )


def _files(cost: RunCost, bill: Bill) -> str:
    """What renders the files that start the run there."""
    chip, provider = load_accelerators().get(bill.accelerator), load_providers().get(cost.provider)
    if cost.is_by_hand:
        return "by hand"
    if chip is not None and chip.backend not in ("nccl", "gloo"):
        return "torchrun"  # clouds' files set up PyTorch for CUDA, ROCm and CPUs
    return "torchrun, slurm" if provider is None else provider.render


def _remarks(bill: Bill) -> Iterator[tuple[str, str]]:
    keeping = bill.keeping
    if keeping.stored_bytes or keeping.sent_bytes:
        stored, sent = format_bytes(keeping.stored_bytes), format_bytes(keeping.sent_bytes)
        yield (
            "storage",
            f"{stored} of object storage for the whole run; the model ({sent}) downloaded once",
        )
    yield from _unknown(bill.costs)
    if bill.spot_unpriced:
        yield "no spot", f"price known at {', '.join(bill.spot_unpriced)}"
    by_hand = sorted({cost.provider for cost in bill.costs if cost.is_by_hand})
    if by_hand:
        yield (
            "by hand",
            (
                f"{', '.join(by_hand)}: the machines have more accelerators than a node of the "
                "run, and `paceline render` writes no files that rent them; rent them yourself "
                "and start `--for torchrun` there"
            ),
        )
    if bill.spot_taken:
        yield (
            "cannot run",
            (
                f"on spot at {', '.join(bill.spot_taken)}: so many machines are taken away more "
                "often than the run can restart"
            ),
        )
    for provider, why in bill.refused:
        yield "cannot run", f"{provider}: {why}"
    text = "CPUs and memory billed separately, block storage, requests, taxes, support"
    yield "not counted", f"{text}, discounts"


def _unknown(costs: Iterable[RunCost]) -> Iterator[tuple[str, str]]:
    of_machine: dict[str, set[str]] = {}
    prices: set[str] = set()
    for cost in costs:
        for text in cost.unknown:
            if "price" in text:
                prices.add(text)
            else:
                of_machine.setdefault(text, set()).add(cost.provider)
    label = "unknown (?)"
    for text, providers in sorted(of_machine.items()):
        yield label, f"{text}, at {', '.join(sorted(providers))}"
        label = ""
    lacking: dict[str, list[str]] = {}
    for what, column in (("storage", "storage"), ("traffic out", "egress")):
        names = sorted(each.split("'s price")[0] for each in prices if each.endswith(what))
        if names:
            lacking.setdefault(", ".join(names), []).append(column)
    for of_these, priced in lacking.items():
        yield "TOTAL lacks", f"{' and '.join(priced)}, whose price is unknown, at {of_these}"


def format_serving(
    costs: Sequence[Serving],
    load: Load,
    even: BreakEven | None,
    accelerator: str,
    at: Mapping[float, Sequence[Serving]],
) -> str:
    """What answering requests costs, for people; `at` other requests a day, too."""
    return "\n".join(_serving(costs, load, even, accelerator, at))


def _serving(
    costs: Sequence[Serving],
    load: Load,
    even: BreakEven | None,
    accelerator: str,
    at: Mapping[float, Sequence[Serving]],
) -> Iterator[str]:
    yield from _labelled(
        "load",
        f"{load.requests_per_day:,.0f} requests a day of {format_seconds(load.latency_s)} each, "
        f"{load.concurrency} at a time on a machine of {accelerator}",
    )
    yield ""
    if not costs:
        yield from _labelled("cost", f"unknown: the catalog has no price of {accelerator}")
        return
    rows = [("PROVIDER", "BILLED", "$/DAY", "$/MONTH", "$/1000 REQ", "BUSY", "PRICE DATE")]
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
                cost.as_of.replace("by ", "<= "),
            )
        )
    yield format_table(rows)
    yield ""
    if even is None:
        lacking = "always on" if costs[0].serverless else "billed by the request"
        text = f"unknown: the catalog has no price of a machine {lacking}"
    elif even.busy >= 1:
        text = (
            f"none: {even.serverless} by request costs less than {even.always_on} always on, up "
            "to the most that one machine answers"
        )
    else:
        text = (
            f"{even.requests_per_day:,.0f} requests a day (one machine {even.busy:.0%} busy): "
            f"below, {even.serverless} by request costs less; above, {even.always_on} always on"
        )
        if (count := even.machines_for_good) > 1:
            text += (
                f", up to the {even.most_per_day:,.0f} that one machine answers. Machines come "
                f"whole: 2 cost less from {2 * even.requests_per_day:,.0f} on"
            )
            if count > 2:
                text += (
                    f", up to {2 * even.most_per_day:,.0f}; at every load from "
                    f"{count * even.requests_per_day:,.0f} ({count} machines), always on costs less"
                )
    yield from _labelled("break-even", text)
    for requests, each in at.items():
        cheapest = {cost.serverless: cost for cost in reversed(each)}
        yield from _labelled(
            "more load" if requests > load.requests_per_day else "less load",
            f"{requests:,.0f} requests a day: "
            + ", ".join(
                f"${format_amount(cost.usd_per_day * 365 / 12)} a month "
                + ("by request" if cost.serverless else f"always on ({cost.num_instances} x)")
                + f" at {cost.provider}"
                for cost in sorted(cheapest.values(), key=lambda cost: cost.usd_per_day)
            ),
        )
    yield from _labelled(
        "not counted", "cold starts, peaks, CPUs and memory billed apart, requests, traffic"
    )


def _labelled(label: str, text: str) -> list[str]:
    return wrapped(f"{label:<12}", text)

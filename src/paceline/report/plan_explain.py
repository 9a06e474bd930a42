"""Where every number of a plan comes from: each part and term with what it is made of."""

from collections.abc import Iterator, Mapping

from paceline.catalog.price import price_day
from paceline.estimate import PART_NAMES, TERM_NAMES, Estimate, useful_passes
from paceline.estimate.estimate import state_bytes
from paceline.parallel.rank_map import AXES, groups, num_nodes_of
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.plan.choose import SIMPLER
from paceline.report.plan_text import (
    how_gathered,
    machines_of,
    of_machine,
)
from paceline.report.table import wrapped
from paceline.units import (
    counted,
    format_amount,
    format_bytes,
    format_count,
    format_seconds,
    significant,
)

_PARTS: Mapping[str, str] = {
    "parameters": "weights of the largest stage, divided by tensor ranks, and by shard ranks if "
    "sharded",
    "gradients": "one per trained parameter",
    "optimizer": "its moments, divided by shard ranks",
    "master copy": "float32 copy of the 16-bit weights, divided by shard ranks",
    "activations": "what a stage's blocks keep for the backward pass x micro-batches in flight "
    "at the peak",
    "gathered": "parameters and gradients of the blocks in use, and autocast's copies",
    "buffers": "of the engine: communication buckets, workspaces for weight gradients",
    "checkpoint": "a copy of the state while it is saved (CPU ranks only)",
    "slack": "reserved by the allocator, not used",
    "overhead": "device context, torch and its libraries, before the model is loaded",
}

_REDUCED = (
    "in full until the last micro-batch is done",
    "sharded, because every micro-batch runs a reduce-scatter",
)

_TERMS: Mapping[str, str] = {
    "compute": "micro-batches x blocks of the slowest stage x (forward + backward), and the output "
    "matrix; a product takes the longer of its compute and memory time (roofline)",
    "recompute": "forward passes repeated during the backward pass",
    "tensor": "4 all-gathers and 4 reduce-scatters a block: only the part that does not overlap",
    "context": "keys and values sent around the ring, or all-to-all of heads, without what "
    "overlaps",
    "expert": "4 all-to-alls a block: tokens to their experts and back, forward and backward",
    "pipeline": "waiting for (stages - 1) micro-batches, without what the schedule overlaps, "
    "plus p2p",
    "data": "reducing gradients and gathering parameters: only the part that does not "
    "overlap compute",
    "optimizer": "reading and writing its state once, at memory bandwidth",
    "fixed": "the same in every step",
    "stragglers": "waiting for slower ranks: more for each doubling of the NVLink domains",
}


_RATES: Mapping[tuple[str, str], tuple[str, str, float]] = {
    ("matmul", "flops_per_s"): ("large matrix products", "TFLOP/s", 1e-12),
    ("", "attention_flops_per_s"): ("attention over long samples", "TFLOP/s", 1e-12),
    ("", "memory_bytes_per_s"): ("elementwise operations and the optimizer", "TB/s", 1e-12),
    ("", "host_s"): ("to launch an operation, on the host", "us", 1e6),
    ("", "collective_s"): ("to start a collective", "us", 1e6),
    ("", "gradient_overlap"): ("of the gradient reduction can overlap", "%", 100),
    ("", "gather_overlap"): ("of full sharding's collectives can overlap", "%", 100),
    ("", "tensor_overlap"): ("of tensor collectives overlap", "%", 100),
    ("", "straggler"): (
        "of the step waits for stragglers, each time the number of NVLink domains doubles",
        "%",
        100,
    ),
}
"""Where a rate is kept and its name -> what it is of, its unit, and units in one of the stored."""


def explain_plan(plan: Plan) -> str:
    """Every part of memory, every term of the step, and the rates they are worked out from."""
    parts = (_memory, _units, _parallelize, _ranks, _time, _money, _rates, _ties)
    return "\n".join(line for part in parts for line in part(plan))


def _memory(plan: Plan) -> Iterator[str]:
    layout, profile = plan.layout, plan.profile
    case = case_of_plan(plan)
    held = state_bytes(layout, case)
    yield ""
    yield "memory of the fullest rank"
    for name, size in plan.estimate.memory.parts.items():
        if size == 0:
            continue
        shown = "unknown" if size is None else format_bytes(size)
        made_of = _PARTS.get(name, "")
        if name == "gradients" and layout.accumulation > 1 and layout.sharding in ("zero2", "full"):
            is_shard = layout.reduce_every_micro_batch or layout.sharding == "zero2"
            made_of += f", {_REDUCED[is_shard]}"
        if name == "gathered" and (how := how_gathered(plan)):
            parameters = f"all parameters in {plan.precision}" if "once" in how else made_of
            made_of = f"{parameters}; they come {how}"
        yield from wrapped(f"  {PART_NAMES.get(name, name):<13}{shown:>9}  ", made_of)
    yield from wrapped(
        "  computed for ",
        f"{format_count(profile.num_parameters)} parameters, {profile.num_blocks} blocks; pipeline "
        f"{layout.pipeline}, tensor {layout.tensor}, shard {layout.shard_degree}, context "
        f"{layout.context}; micro-batch {layout.micro_batch} of {profile.seq_len or '?'} tokens; "
        f"recompute {layout.recompute}",
    )
    yield from wrapped(
        "  bytes        ",
        f"per parameter (engine {case.engine.name}): weight {held.weight:g}, "
        f"gradient {held.gradient:g}, master copy {held.master:g}, "
        f"{plan.optimizer} {held.moments:g}",
    )


def _units(plan: Plan) -> Iterator[str]:
    """What full sharding gathers at a time."""
    if not plan.units:
        return
    yield ""
    yield "units of full sharding: one all-gather each"
    for unit in plan.units:
        apart = f"; its experts {format_bytes(unit.apart_bytes)} more" if unit.apart_bytes else ""
        yield f"  {unit.count:>4} x {format_bytes(unit.num_bytes):>9}  {unit.name}{apart}"


def _parallelize(plan: Plan) -> Iterator[str]:
    """Which module is split how over the tensor ranks."""
    if not plan.parallelize:
        return
    yield ""
    yield f"parallelize, over {plan.layout.tensor} tensor ranks"
    width = max(map(len, plan.parallelize)) + 2
    for module, way in plan.parallelize.items():
        yield f"  {module:<{width}}{way}"


def _time(plan: Plan) -> Iterator[str]:
    price, layout = plan.estimate, plan.layout
    if price.step_s is None:
        return
    yield ""
    yield f"time of a step: {format_seconds(price.step_s)}"
    for name, seconds in price.terms.items():
        if seconds == 0:
            continue
        shown, share = TERM_NAMES.get(name, name), seconds / price.step_s
        head = f"  {shown:<19}{format_seconds(seconds):>9}  {share:>6.1%}  "
        made_of = _TERMS.get(name, "")
        if name == "recompute" and _repeats_elementwise(price):
            made_of = "elementwise operations repeated in the backward pass"
        if name == "optimizer" and plan.optimizer == "muon":
            made_of += ", and the matrix products that make each hidden gradient orthogonal"
        yield from wrapped(head, made_of)
    yield from wrapped(
        "  computed for ",
        f"{layout.accumulation} micro-batches of {layout.micro_batch} on each of {layout.data} "
        f"data ranks, {plan.precision}, {plan.layout_name}",
    )
    if price.mfu is not None and price.hfu is not None:
        passes = useful_passes(plan.profile)
        frozen = ", as some weights are frozen" if passes < 3 else ""
        repeats = f"HFU {price.hfu:.1%} also counts what is recomputed"
        if _repeats_elementwise(price):
            repeats = "HFU (counts recompute) is equal: only elementwise operations are repeated"
        yield from wrapped(
            "  MFU          ",
            f"{price.mfu:.1%}: {passes:.3g} x forward FLOPs{frozen} (causal attention halved, "
            f"recompute not counted), divided by peak x ranks x seconds; {repeats}",
        )


def _repeats_elementwise(price: Estimate) -> bool:
    """Whether there is recompute, and it adds nothing to the FLOPs."""
    mfu, hfu = price.mfu or 0.0, price.hfu or 0.0
    return hfu <= mfu * 1.001 and bool(price.terms.get("recompute"))


def _money(plan: Plan) -> Iterator[str]:
    """The whole run at the cheapest of the machines of which most is known."""
    if not plan.costs:
        return
    yield ""
    yield "cost of a run with its failures, the cheapest on demand and spot (all: paceline cost)"
    for cost in plan.costs:
        kept = cost.terms.get("storage", 0.0) + cost.terms.get("egress", 0.0)
        yield from wrapped(
            f"  {cost.provider:<13}{cost.way:<11}${format_amount(cost.usd):>9}  ",
            f"{machines_of(cost)} for {significant(cost.hours)} h at "
            f"${cost.per_instance_hour_usd:.4g} an hour each"
            + (f", ${format_amount(kept)} for storage and egress" if kept else "")
            + f"; price of {price_day(cost.as_of)}"
            f"{of_machine(cost)}",
        )


def _rates(plan: Plan) -> Iterator[str]:
    """The rates of one rank, as the step's terms use them."""
    case = case_of_plan(plan)
    if case.rates is None:
        return
    yield ""
    source = "a catalog file of yours" if plan.measured_rates else "docs/concepts/estimates.md"
    yield f"speeds of a rank, as the time above assumes them (source: {source})"
    for (owner, name), (what, unit, scale) in _RATES.items():
        value = getattr(getattr(case.rates, owner) if owner else case.rates, name)
        yield f"  {float(value) * scale:>6.3g} {unit:<9}{what}"


def _ranks(plan: Plan) -> Iterator[str]:
    """Which ranks are in one group, along every axis that is split."""
    per_node = plan.cluster.ranks_per_node
    for axis in AXES:
        ranks, *others = groups(plan.layout, axis)
        if len(ranks) > 1:
            shown = [str(rank) for rank in ranks]
            shown[3:-1] = ["..."] if len(ranks) > 8 else shown[3:-1]
            on = counted(num_nodes_of(ranks, per_node), "node")
            yield from wrapped(
                f"{axis} ranks  ",
                f"{counted(1 + len(others), 'group')}; the first is {' '.join(shown)}, on {on}",
            )


def _ties(plan: Plan) -> Iterator[str]:
    yield ""
    yield from wrapped(
        "choice    ",
        "of the layouts within plan.simpler_margin of the fastest, the simplest is chosen. The "
        "first of these rules by which they differ decides: "
        + "; ".join(f"{number}. {rule}" for number, rule in enumerate(SIMPLER, start=1)),
    )

"""A plan as one readable screen of plain text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.estimate import PART_NAMES, TERM_NAMES
from paceline.estimate.cost import RunCost
from paceline.estimate.estimate import state_bytes
from paceline.parallel import Layout
from paceline.plan import Decision, Plan, Rejected
from paceline.plan.case import case_of_plan
from paceline.plan.choose import AXES
from paceline.plan.host import host_limit_bytes, host_limit_source, memory_beside_disk_of_one
from paceline.report.recovery_text import recovery_lines
from paceline.report.table import wrapped
from paceline.topology import Cluster, Level
from paceline.units import (
    bytes_apart,
    counted,
    format_amount,
    format_bytes,
    format_count,
    format_flops_per_s,
    format_interval,
    format_seconds,
)

_BAR_WIDTH = 30
_MOST_STAGES = 16
"""Stages whose blocks fit on one line."""

_NUM_OTHERS = 4
"""Layouts listed besides the chosen one; `--json` has more, `--all` any number."""


def format_plan(plan: Plan, *, explained: bool = False) -> str:
    """The layout and why, the batch, memory by part, time, money, the others, and decisions.

    Args:
        explained: Whether `explain_plan` follows.
    """
    return "\n".join(
        (
            *_cautions(plan, first=True),
            *_headline(plan),
            *_cautions(plan),
            *_memory(plan, "below" if explained else "--explain"),
            *_time(plan),
            *_money(plan),
            *recovery_lines(plan),
            *_others(plan),
            *_decisions(plan),
        )
    )


def plan_summary(plan: Plan) -> list[str]:
    """The plan in six lines, what runs where, with how much memory, how fast, and for how long; and
    its warnings."""
    cluster, price = plan.cluster, plan.estimate
    memory = price.memory.total_bytes
    needed, limit = bytes_apart(memory or 0, plan.limit_bytes)
    needs = "unknown" if memory is None else f"{needed} a rank, estimated"
    pace = "unknown for this model or accelerator"
    if price.step_s is not None:
        pace = f"{format_seconds(price.step_s)} a step"
        if price.tokens_per_s is not None:
            pace += f", {format_count(price.tokens_per_s)} tokens/s"
        pace += ", estimated"
    # Of this machine the steps alone are known: its start takes seconds, which no plan counts.
    long = "of steps" if cluster.is_local else "in all"
    whole = [] if plan.wall_s is None else [f"{format_seconds(plan.wall_s)} {long}, estimated"]
    if plan.cost is not None:
        whole.append(f"${format_amount(plan.cost.usd)} at {plan.cost.provider}")
    elif plan.why_no_cost is not None:
        whole.append(f"cost unknown: {plan.why_no_cost}")
    return [
        *_cautions(plan, first=True),
        *_layout(plan),
        _row("on", _place(cluster)),
        _row("batch", _batch_equation(plan)),
        _row("memory", f"{needs}; {limit} may be used ({_share(plan)})"),
        _row("time", pace),
        *wrapped(_row("run", ""), "; ".join([*whole, "--verbose shows the whole plan"])),
        *_cautions(plan),
    ]


def _row(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _place(cluster: Cluster) -> str:
    of = "this machine" if cluster.is_local else "from the job file, not this machine"
    return f"{cluster.name} over {cluster.backend} ({of})"


def _headline(plan: Plan) -> Iterator[str]:
    cluster, profile = plan.cluster, plan.profile
    yield from _layout(plan)
    yield _row("on", _place(cluster))
    yield from wrapped(_row("links", ""), _links(cluster)) if _links(cluster) else ()
    reasons = {each.field: each.reason for each in plan.decisions}
    why = (reasons.get("layout.offload"), reasons.get("layout.sharding", _fixed(plan)))
    yield from wrapped(_row("why", ""), ". With offload: ".join(filter(None, why)))
    yield from wrapped(_row("batch", ""), _batch_equation(plan))
    yield _row(
        "model",
        f"{format_count(profile.num_parameters)} parameters "
        f"({profile.num_parameters:,}), {counted(profile.num_blocks, 'block')}, {_precision(plan)}"
        + ("" if plan.optimizer == "adamw" else f", {plan.optimizer}")
        + ("" if plan.engine == "paceline" else f", on {plan.engine_name}"),
    )


def _fixed(plan: Plan) -> str:
    """Why this way to split, where the job fixes the sharding: the degrees may still be open."""
    fields = {each.field.removeprefix("layout.") for each in plan.decisions}
    opened = [f"{axis} {getattr(plan.layout, axis)}" for axis in AXES if axis in fields]
    if not opened:
        return "fixed by the job"
    return f"the job fixes the sharding; for {' and '.join(opened)} see `decided` below"


def _precision(plan: Plan) -> str:
    """What is computed in, and the weights' own precision where it is another."""
    is_mixed = plan.precision != "fp32" and state_bytes(plan.layout, case_of_plan(plan)).weight == 4
    return f"{plan.precision} with fp32 weights" if is_mixed else plan.precision


def _links(cluster: Cluster) -> str:
    """Which links the estimate counts on, and from where they are known."""
    if cluster.backend == "gloo":
        return ""
    return "; ".join(
        f"{level.link} among {level.size} ranks, {level.bytes_per_s / 1e9:.4g} GB/s a rank "
        f"({_source(level, cluster)})"
        for level in cluster.levels
    )


def _source(level: Level, cluster: Cluster) -> str:
    if level.seen is not None:
        return f"nvidia-smi topo -m: {level.seen}"
    if level.known != "cited":
        return level.known
    if cluster.is_local and level.name != "network":
        return "catalog: no answer from nvidia-smi topo -m"
    return "catalog"


def _cautions(plan: Plan, *, first: bool = False) -> Iterator[str]:
    """The warnings; above all else, those that the plan is not carried out."""
    for each in plan.cautions:
        if each.keeps_from_running is not first:
            continue
        for label, text in (("warning", f"{each.about}: {each.what}"), ("", f"fix: {each.fix}")):
            yield from wrapped(_row(label, ""), text)


def _layout(plan: Plan) -> Iterator[str]:
    named = plan.layout_name + plan.layout.recomputed
    yield from wrapped(_row("layout", ""), named + _offloaded(plan))


def _offloaded(plan: Plan) -> str:
    if plan.layout.offload == "none":
        return ""
    place = "on disk" if plan.layout.offload == "nvme" else "in host memory"
    what = plan.layout.offloaded
    return f", {what} offloaded ({place}, {format_bytes(plan.host_bytes)} a node)"


def _batch_equation(plan: Plan) -> str:
    layout, length = plan.layout, plan.profile.seq_len
    ranks = "data rank" if layout.num_ranks > layout.data else "rank"
    return (
        f"micro-batch {layout.micro_batch} x {counted(layout.accumulation, 'accumulation step')} "
        f"x {layout.data} {ranks}{'s' if layout.data > 1 else ''} "
        f"= {layout.global_batch} sample{'' if layout.global_batch == 1 else 's'} "
        f"{'' if length is None else f'of {length:,} tokens '}a step"
    )


def _share(plan: Plan) -> str:
    whole = "of what is free" if plan.cluster.is_local else "of a rank's"
    return f"{1 - plan.head_room:.0%} {whole}"


def known_by(cluster: Cluster, field: str) -> str:
    """How a fact of the machine is known, in the word of the screens."""
    return cluster.known.get(field, "cited").replace("cited", "catalog")


def how_gathered(plan: Plan) -> str:
    """How all parameters come together, where they do not block by block: our runtime's ZeRO-2 is
    FSDP2 that gathers them once a step, and offloaded ones come from the host."""
    layout, is_ours = plan.layout, plan.engine == "paceline"
    is_moved = is_ours and layout.offload_parameters
    once = is_ours and (layout.sharding == "zero2" or (is_moved and layout.sharding == "zero1"))
    return " ".join(["from the host"] * is_moved + ["once a step"] * once)


def _memory(plan: Plan, parts: str) -> Iterator[str]:
    memory, cluster = plan.estimate.memory, plan.cluster
    needed, limit = bytes_apart(memory.known_bytes, plan.limit_bytes)
    amount = needed if memory.total_bytes is not None else f"{needed} + ?"
    source = known_by(cluster, "usable_bytes")
    yield ""
    yield _row("memory", f"{amount} on the fullest rank, estimated (parts: {parts})")
    if memory.low_bytes is not None and memory.high_bytes is not None:
        ends = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
        engine = f"{plan.engine} {plan.engine_version}".strip()
        yield _row("", f"{ends}: no peak of a run with {engine} was compared")
    largest = max(part or 0 for part in memory.parts.values())
    for name, size in memory.parts.items():
        if size is None:
            yield f"  {PART_NAMES.get(name, name):<14}{'unknown':>10}"
            continue
        if size:
            bar = "#" * max(1, round(_BAR_WIDTH * size / largest))
            bar += f"  {how_gathered(plan)}" if name == "gathered" else ""
            yield f"  {PART_NAMES.get(name, name):<14}{format_bytes(size):>10}  {bar}".rstrip()
    yield (
        f"  {'may be used':<14}{limit:>10}  "
        f"{1 - plan.head_room:.0%} of {format_bytes(cluster.usable_bytes)} a rank ({source})"
    )
    if plan.layout.offload != "none":
        most = host_limit_bytes(cluster, plan.layout.offload)
        needed, limit = bytes_apart(plan.host_bytes, most)
        place = "on disk" if plan.layout.offload == "nvme" else "on the host"
        yield (
            f"  {place:<14}{needed:>10}  the ranks of a node, of "
            f"{limit} ({host_limit_source(cluster, plan.layout.offload)})"
        )
        if beside := memory_beside_disk_of_one(plan.layout, case_of_plan(plan)):
            needed, limit = bytes_apart(beside, host_limit_bytes(cluster, "cpu"))
            yield (
                f"  {'on the host':<14}{needed:>10}  gradients and buffers beside the disk, of "
                f"{limit} ({host_limit_source(cluster, 'cpu')})"
            )
    if len(plan.stages) > 1:
        sizes = [stage.known_bytes for stage in plan.stages]
        least, most = min(sizes), max(sizes)
        yield (
            f"  {'stages':<14}{format_bytes(least):>10}  to {format_bytes(most)} over "
            f"{len(sizes)} stages; stage {sizes.index(most) + 1} is the fullest"
        )
    if len(set(plan.stage_blocks)) > 1 and len(plan.stage_blocks) <= _MOST_STAGES:
        listed = ", ".join(map(str, plan.stage_blocks))
        yield f"  {'blocks':<16}{listed} a stage; the last also has the output matrix"


def _time(plan: Plan) -> Iterator[str]:
    price = plan.estimate
    yield ""
    if price.step_s is None:
        yield _row("time", "unknown for this model or accelerator")
    else:
        text = f"{format_seconds(price.step_s)} a step"
        if price.step_low_s is not None and price.step_high_s is not None:
            low, high = format_seconds(price.step_low_s), format_seconds(price.step_high_s)
            text += f" (expected {low} to {high})"
        if price.tokens_per_s is not None:
            text += f", {format_count(price.tokens_per_s)} tokens/s"
        yield _row("time", f"{text}, estimated")
        terms = [
            f"{TERM_NAMES.get(name, name)} {format_seconds(term)}"
            for name, term in price.terms.items()
            if term >= _LEAST_SHARE * price.step_s
        ]
        yield from wrapped(_row("", ""), ", ".join(terms))
        yield from _utilisation(plan)
    yield _row(
        "checkpoint",
        f"{format_bytes(price.num_checkpoint_bytes)} every {_steps(plan.checkpoint_every)}; "
        f"evaluation every {_steps(plan.evaluate_every)}",
    )


_LEAST_SHARE = 0.001
"""Terms below this share of the step are left to `--explain`."""


def _utilisation(plan: Plan) -> Iterator[str]:
    """Useful FLOPs as a share of the peak; HFU also counts recomputed ones."""
    price, cluster = plan.estimate, plan.cluster
    peak = cluster.peak_flops_per_s.get(plan.precision)
    if price.mfu is None or peak is None:
        return
    hfu = f", HFU {price.hfu:.1%}" if price.hfu and price.hfu > price.mfu * 1.001 else ""
    yield _row(
        "",
        f"MFU {price.mfu:.1%}{hfu} of a peak of {format_flops_per_s(peak)} a rank "
        f"({known_by(cluster, 'peak_flops_per_s')})",
    )


def _money(plan: Plan) -> Iterator[str]:
    """The whole run: how long, what failures leave of it, and what it costs."""
    cost, good = plan.cost, plan.goodput
    taken = " or spot instance taken" if cost is not None and cost.way == "spot" else ""
    if good is not None and plan.wall_s is not None:
        deadline = (each.texts[0] for each in plan.limits if each.name == "deadline")
        wall = next(deadline, format_seconds(plan.wall_s))
        yield from wrapped(
            _row("run", ""),
            f"{wall}; goodput {good.useful:.2%}{losses(good.terms, 0)}; assumed: a "
            f"failure{taken} every {format_interval(good.mtbf_s)}",
        )
    if cost is not None:
        yield from wrapped(
            _row("cost", ""),
            f"{' or '.join(map(_priced, _ways(plan, cost)))}, "
            f"{format_amount(cost.accelerator_hours)} accelerator-hours",
        )
    elif plan.why_no_cost is not None:
        yield from wrapped(_row("cost", ""), f"unknown: {plan.why_no_cost}")
    for label, is_kept in (("OVER", False), ("within", True), ("limits", None)):
        listed = " and ".join(
            f"the {each.name} of {each.texts[-1]}"
            for each in plan.limits
            if each.is_kept is is_kept and each.name != "memory"
        )
        if listed:
            yield _row(label, listed + (": not known to be kept" if is_kept is None else ""))


def _ways(plan: Plan, chosen: RunCost) -> list[RunCost]:
    """The plan's own cost, and the least of the other way to pay."""
    return [chosen, *[each for each in plan.costs if each.way != chosen.way][:1]]


def _priced(cost: RunCost) -> str:
    return f"${format_amount(cost.usd)} {cost.way} ({cost.provider}{of_machine(cost)})"


def losses(terms: Mapping[str, float], digits: int) -> str:
    """Shares of the wall time that are not goodput, without those that round to 0."""
    shown = [
        f"{_LOSSES[name]} {share:.{digits}%}"
        for name, share in terms.items()
        if round(share, digits + 2)
    ]
    return f" ({', '.join(shown)})" if shown else ""


_LOSSES = {
    "saving": "saving checkpoints",
    "copies": "copying to memory",
    "lost": "repeated steps",
    "restart": "restarting",
}
"""Term of `Goodput` -> how it is called."""


def machines_of(cost: RunCost) -> str:
    """How many of which machine; a name that begins with a number is set apart from theirs."""
    name = f"({cost.instance})" if cost.instance[0].isdigit() else cost.instance
    return f"{cost.num_instances} x {name}"


def of_machine(cost: RunCost) -> str:
    """What a person must know of the machines of a cost: what decides whether they run the plan
    and is not known, and that they are larger than a node and no file rents them."""
    facts = " and ".join(cost.unknown_facts)
    unknown = facts and f"; unknown whether {facts} will do"
    return unknown + ("; larger than a node: rent it by hand" if cost.is_by_hand else "")


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _others(plan: Plan) -> Iterator[str]:
    if not plan.rejected:
        return
    yield ""
    is_whole = plan.space_size <= len(plan.rejected) + 1
    took = f" in {format_seconds(plan.search_s)}" if plan.search_s else ""
    took = "" if is_whole else f"{took}; {plan.num_fitting:,} fit"
    size = len(plan.rejected) if is_whole else plan.space_size
    yield _row("others", f"considered {size:,} layout{'s' * (size != 1)}{took}")
    shown = _most_telling(plan.rejected)
    heading = ""
    for each in shown:
        own = each.passed_over or ("as fast or slower" if heading else "")
        if own != heading:
            heading = own
            yield from wrapped("  ", f"{heading}:")
        yield from wrapped("  ", _short(each.layout, plan.layout, plan.full_sharding), indent=4)
        yield from wrapped(" " * 6, each.reason)
    hidden = len(plan.rejected) - _NUM_OTHERS
    if hidden > 0:
        yield f"  {hidden} more: --json" if is_whole else "  more: --all N prints the N fastest"


def _most_telling(rejected: Sequence[Rejected]) -> list[Rejected]:
    """Those that are shown, in their order: the best of each way to split, then the first of the
    rest."""
    best = {
        (each.layout.name, each.layout.reduce_every_micro_batch): each for each in rejected[::-1]
    }
    order = sorted(range(len(rejected)), key=lambda index: rejected[index] not in best.values())
    return [rejected[index] for index in sorted(order[:_NUM_OTHERS])]


def _short(layout: Layout, chosen: Layout, full: str) -> str:
    """The name, and whatever else is not as in the chosen layout."""
    return ", ".join([layout.named(full), *differences(layout, chosen)])


def full_name(layout: Layout, full: str) -> str:
    """The name, with everything by which two layouts of one name and batch differ.

    >>> ring = Layout(data=2, sharding="zero1", micro_batch=1, accumulation=8, context=2)
    >>> full_name(ring, "FSDP2")
    'data 2 x context parallel 2 (ring), ZeRO-1'

    Args:
        full: The engine's word for full sharding.
    """
    plain = replace(
        layout,
        reduce_every_micro_batch=False,
        recompute_every=1,
        offload="none",
        offload_parameters=False,
    )
    return ", ".join([layout.named(full), *differences(layout, plain)])


def differences(layout: Layout, chosen: Layout) -> Iterator[str]:
    """How a layout is split and run in another way than the chosen one, in words."""
    if layout.reduce_every_micro_batch and not chosen.reduce_every_micro_batch:
        yield "reduces each micro-batch"
    again = (layout.recompute, layout.recompute_every)
    if again != (chosen.recompute, chosen.recompute_every):
        every = f" every {layout.recompute_every} blocks" if layout.recompute_every > 1 else ""
        yield f"{'no' if layout.recompute == 'none' else layout.recompute} recompute{every}"
    moved = (layout.offload, layout.offload_parameters)
    if moved != (chosen.offload, chosen.offload_parameters):
        what = layout.offloaded
        yield "no offload" if layout.offload == "none" else f"{what} on {layout.offload}"
    if layout.micro_batch != chosen.micro_batch:
        yield f"micro-batch {layout.micro_batch}"


def _decisions(plan: Plan) -> Iterator[str]:
    in_why = ("layout.offload", "layout.sharding")
    shown: list[Decision] = [each for each in plan.decisions if each.field not in in_why]
    if not shown:
        return
    yield ""
    yield "decided"
    for each in shown:
        yield from wrapped("  ", f"{each.field} = {each.value}: {each.reason}", indent=6)

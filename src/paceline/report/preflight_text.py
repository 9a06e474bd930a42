"""A preflight's verdict for people: nodes x groups of checks, and what is not right in words."""

from collections.abc import Iterator, Sequence

from paceline.check.preflight.bandwidth import NodeRate
from paceline.check.preflight.names import fold_names
from paceline.check.preflight.preflight import Preflight
from paceline.check.preflight.result import Status
from paceline.report.table import format_table
from paceline.units import counted, format_flops_per_s

_GROUPS = {
    "host": (
        *("answers", "shared-memory", "open-files", "locked-memory", "processes", "stack"),
        *("host-memory", "host-ecc", "cpus", "clock", "machines"),
    ),
    "accelerators": (
        *("accelerators", "driver", "accelerator-memory", "accelerator-ecc", "fabric", "iommu"),
        *("accelerator-clocks", "kernel-log", "pcie", "links", "acs", "numa", "torch", "matmul"),
    ),
    "storage": (
        *("checkpoint-folder", "checkpoint-room", "checkpoint-ephemeral", "shared-folder"),
        *("folder", "caches"),
    ),
    "software": ("versions", "packages", "code", "data", "data-check", "environment", "settings"),
    "network": (
        *(
            "interface",
            "ports",
            "own-name",
            "names",
            "reach",
            "rdma",
            "rdma-rate",
            "gpu-direct",
            "rdma-alike",
        ),
        *("mtu", "all-reduce"),
    ),
}
_WORDS = {
    Status.PASS: "ok",
    Status.WARNING: "warning",
    Status.FAIL: "FAIL",
    Status.UNKNOWN: "ok ?",
}
_ORDER = (Status.FAIL, Status.WARNING, Status.UNKNOWN, Status.PASS)
_MOST_ROWS = 24
"""Most nodes that are shown one by one; of more, those that pass are one row."""


def format_preflight(verdict: Preflight, *, shows_all: bool = False) -> Iterator[str]:
    """Lines for a terminal."""
    rows = [("node", *_GROUPS, "verdict")]
    bad = set(verdict.bad_nodes)
    warned = {each.node for each in verdict.results if each.status is Status.WARNING}
    quiet = [node for node in verdict.nodes if node not in bad and node not in warned]
    folds = len(verdict.nodes) > _MOST_ROWS and len(quiet) > 1
    rows += [_row(verdict, node) for node in verdict.nodes if not folds or node not in quiet]
    if folds:
        rows.append((fold_names(quiet), *("ok" for _ in _GROUPS), "pass"))
    yield from format_table(rows).splitlines()
    if len(verdict.rates) > 1:
        yield ""
        yield from _rates(verdict.rates)
    for status in (Status.FAIL, Status.WARNING):
        yield from _details(verdict, status)
    if shows_all:
        yield from _everything(verdict)
    else:
        yield from _not_looked_at(verdict)
    yield ""
    if verdict.good_nodes:
        yield f"pass  {fold_names(verdict.good_nodes)}"
    if verdict.bad_nodes:
        yield f"fail  {fold_names(verdict.bad_nodes)}"


def _rates(rates: Sequence[NodeRate]) -> Iterator[str]:
    """What each node multiplies, slowest first, and what equal shares lose by the slowest."""
    equal, slowest = 1 / len(rates), min(rates, key=lambda each: each.share)
    rows = [("node", "devices", "matrix products", "share", "equal share")]
    for each in sorted(rates, key=lambda each: each.share)[:_MOST_ROWS]:
        rate = format_flops_per_s(each.flops_per_s) if each.flops_per_s else f"none: {each.why_not}"
        rows.append((each.node, str(each.num_devices), rate, f"{each.share:.1%}", f"{equal:.1%}"))
    yield from format_table(rows).splitlines()
    if slowest.flops_per_s:
        yield (
            f"A synchronous step gives every rank the same share and waits for {slowest.node}: "
            f"{1 - len(rates) * slowest.share:.0%} of what the nodes can do is lost."
        )
    else:
        yield f"{slowest.node} computes nothing: repair it, or take it out of the job."


def _row(verdict: Preflight, node: str) -> tuple[str, ...]:
    mine = [each for each in verdict.results if each.node == node]
    if any(each.name == "answers" and each.status is Status.FAIL for each in mine):
        return (node, *("-" for _ in _GROUPS), "fail: no answer")
    cells = []
    for names in _GROUPS.values():
        found = [each.status for each in mine if each.name in names]
        cells.append(next((_WORDS[each] for each in _ORDER if each in found), "-"))
    fails = sum(each.status is Status.FAIL for each in mine)
    warnings = sum(each.status is Status.WARNING for each in mine)
    end = f"pass ({counted(warnings, 'warning')})" if warnings else "pass"
    end = f"fail ({fails})" if fails else end
    return (node, *cells, end)


def _details(verdict: Preflight, status: Status) -> Iterator[str]:
    """Nodes that say the same are named together."""
    together: dict[tuple[str, str | None, str, str], list[str]] = {}
    for each in verdict.results:
        if each.status is status:
            key = (each.name, each.id, each.evidence, each.fix)
            together.setdefault(key, []).append(each.node)
    for (name, id, evidence, fix), nodes in together.items():
        yield ""
        yield f"{status.value.upper()} {name} on {fold_names(nodes)}  [{id}]"
        yield f"  {evidence}"
        yield f"  fix: {fix}"


def _not_looked_at(verdict: Preflight) -> Iterator[str]:
    found: dict[tuple[str, str], None] = dict.fromkeys(
        (each.name, each.evidence) for each in verdict.results if each.status is Status.UNKNOWN
    )
    if found:
        yield ""
        yield "not looked at:"
        yield from (f"  {name}: {why}" for name, why in found)


def _everything(verdict: Preflight) -> Iterator[str]:
    for node in dict.fromkeys(each.node for each in verdict.results):
        yield ""
        yield node
        for each in verdict.results:
            if each.node == node:
                yield f"  {each.status.value:<8} {each.name:<18} {each.evidence}"

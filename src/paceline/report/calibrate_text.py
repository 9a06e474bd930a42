"""What `paceline calibrate` found, for people: a table, and the comments of the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.catalog.efficiencies import AS_OTHER, Efficiencies
from paceline.catalog.measured import Measurements
from paceline.estimate.fit_rates import FitError, Fitted
from paceline.estimate.rates import shipped_share
from paceline.topology import Cluster
from paceline.units import counted, format_bytes, format_flops_per_s, significant

Line = tuple[str, str, str, str, str]


def measured_by(measured: Measurements) -> str:
    """One line: who, when, with what. It is the table's `source`."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    nodes = measured.num_ranks // measured.ranks_per_node
    ranks = (f"{nodes} nodes x " if nodes > 1 else "") + counted(measured.ranks_per_node, "rank")
    threads = f" of {counted(measured.threads, 'thread')}" if measured.backend == "gloo" else ""
    return (
        f"measured by paceline calibrate, {measured.at}, {measured.device}, {ranks}"
        f"{threads}, {measured.seconds:.0f} s; {versions}"
    )


def file_comments(measured: Measurements, fitted: Fitted) -> list[str]:
    """How much was measured, how much it varied, and how well the constants give it again."""
    lines = [measured_by(measured)]
    for part, error in fitted.errors.items():
        spreads = sorted(_spreads(measured, part))
        middle = spreads[len(spreads) // 2]
        lines.append(
            f"{part}: {len(spreads)} times, repeats vary by {middle:.1%} (median); {_off(error)}; "
            f"as shipped {fitted.shipped_errors[part].median:.0%}"
        )
    return lines + list(fitted.notes)


def _off(error: FitError) -> str:
    if not error.num_held_out:
        return "too few to hold some out"
    return (
        f"on {error.num_held_out} that were not fitted, off by {error.median:.1%} (median), "
        f"{error.p90:.0%} (p90)"
    )


def _spreads(measured: Measurements, part: str) -> list[float]:
    if part.startswith("matmul."):
        kind = part.partition(".")[2]
        return [each.spread for each in measured.products if each.precision == kind]
    if part == "attention":
        return [each.spread for each in measured.attention]
    return [each.spread for each in measured.collectives]


def calibration_lines(
    measured: Measurements, fitted: Fitted, cluster: Cluster, shipped: Efficiencies
) -> list[Line]:
    """Rows of a table: what, best rate seen, peak, constant as shipped, constant as measured."""
    head: Line = ("WHAT", "BEST MEASURED", "PEAK", "SHIPPED", "MEASURED")
    return [
        head,
        *_product_lines(measured, fitted, cluster, shipped),
        *_other_lines(measured, fitted, cluster, shipped),
        *_collective_lines(measured, fitted, cluster),
    ]


def _product_lines(
    measured: Measurements, fitted: Fitted, cluster: Cluster, shipped: Efficiencies
) -> Iterator[Line]:
    kinds = list(dict.fromkeys(each.precision for each in measured.products))
    for kind in kinds:
        best = max(each.flops_per_s for each in measured.products if each.precision == kind)
        peak = cluster.peak_flops_per_s.get(kind)
        shown = "unknown" if peak is None else format_flops_per_s(peak)
        usual = shipped.matmul_of(cluster.accelerator, kind)
        row: Mapping[str, Any] = {}
        if f"matmul.{kind}" in fitted.errors:
            row = fitted.row["matmul"][AS_OTHER.get(kind, kind)]
        name = f"matmul {kind}"
        yield name, format_flops_per_s(best), shown, *_pair("share", usual.share, row)
        if row:
            yield "", "", "", *_pair("short_k", usual.short_k, row)
            yield "", "", "", *_pair("launch_s", usual.launch_s, row)
            yield "", "", "", *_pair("memory_share", usual.memory_share, row)
    for each in measured.sustained:
        share = each.flops_per_s / each.burst_flops_per_s
        loop = f"{share:.3f} of burst"
        rate = format_flops_per_s(each.flops_per_s)
        yield f"{each.seconds:.0f} s of {each.precision}", rate, "", "", loop


def _other_lines(
    measured: Measurements, fitted: Fitted, cluster: Cluster, shipped: Efficiencies
) -> Iterator[Line]:
    row = fitted.row
    wide = cluster.peak_flops_per_s.get("bf16") or cluster.peak_flops_per_s.get("fp32")
    peak = "unknown" if wide is None else format_flops_per_s(wide)
    for key in ("flash3", "flash2"):
        if key in row:
            yield f"attention {key}", "", peak, *_pair("share", shipped.attention[key], row, key)
    if "backward" in row:
        yield "", "", "", *_pair("backward", shipped.attention["backward"], row)
        half = shipped.of_accelerator(shipped.attention_half_len, cluster.accelerator)
        yield "", "", "", *_pair("attention_half_len", half, row)
    if measured.memory:
        best = max(each.bytes_per_s for each in measured.memory)
        known = cluster.memory_bytes_per_s
        yield (
            "memory, each rank",
            _rate(best),
            "unknown" if known is None else _rate(known),
            *_pair("memory_share", shipped.step["memory_share"], row),
        )


def _collective_lines(measured: Measurements, fitted: Fitted, cluster: Cluster) -> Iterator[Line]:
    spans = list(
        dict.fromkeys(
            (each.kind, each.is_inside_node, each.num_ranks) for each in measured.collectives
        )
    )
    for kind, inside, ranks in spans:
        those = [
            each
            for each in measured.collectives
            if (each.kind, each.is_inside_node) == (kind, inside)
        ]
        best = max(those, key=lambda each: each.bus_bytes_per_s)
        least = min(each.seconds for each in those)
        yield (
            f"{kind} of {ranks}",
            f"{_rate(best.bus_bytes_per_s)} bus, {_rate(best.algorithm_bytes_per_s)} payload",
            f"at {format_bytes(best.num_bytes)}",
            "",
            f"{least * 1e6:.0f} us at least",
        )
    for level in cluster.levels:
        name = "network" if level.name == "network" else "link"
        share, latency = f"{name}_share", f"{name}_latency_s"
        if share in fitted.row:
            peak = _rate(level.bytes_per_s)
            yield level.link, "", peak, *_pair(share, shipped_share(level), fitted.row)
            yield "", "", "", *_pair(latency, level.latency_s, fitted.row)


def _pair(
    name: str, usual: float, row: Mapping[str, Any], key: str | None = None
) -> tuple[str, str]:
    found = row.get(key or name)
    return f"{name} {significant(usual)}", "-" if found is None else f"{significant(found)}"


def _rate(bytes_per_s: float) -> str:
    return f"{significant(bytes_per_s / 1e9)} GB/s"


def error_lines(fitted: Fitted) -> Iterator[str]:
    """How far the constants are off, beside those that are shipped."""
    for part, error in fitted.errors.items():
        usual = fitted.shipped_errors[part]
        yield f"{part}: {_off(error)}; as shipped {usual.median:.0%}, {usual.p90:.0%}"
    yield from fitted.notes

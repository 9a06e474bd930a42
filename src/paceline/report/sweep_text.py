"""A sweep of all-reduce as plain text."""

from collections.abc import Sequence
from typing import Any

from paceline.check.preflight.bandwidth import SLOW_SHARE
from paceline.plan import Plan
from paceline.record.sweep import Sweep
from paceline.report.table import format_table
from paceline.units import counted, format_bytes, format_seconds, significant


def sweep_lines(sweep: Sweep, plan: Plan | None) -> list[str]:
    """What was measured size by size, beside what the plan takes for this machine."""
    rows: list[tuple[str, ...]] = [("size", "time", "algbw GB/s", "busbw GB/s", "repeats")]
    for row in sweep.rows:
        rates = (row.algbw_bytes_per_s / 1e9, row.busbw_bytes_per_s / 1e9)
        rows.append(
            (
                format_bytes(row.bytes),
                format_seconds(row.seconds),
                *(f"{rate:.3f}" for rate in rates),
                str(row.repeats),
            )
        )
    best = sweep.best_bytes_per_s
    found = [
        (
            f"{counted(sweep.world_size, 'rank')}, {sweep.backend} on {sweep.device}, torch "
            f"{sweep.torch}"
        ),
        format_table(rows),
        f"best bus bandwidth: {significant(best / 1e9)} GB/s (measured)",
    ]
    share = None if plan is None else _share_reached(plan, sweep)
    if plan is not None and share is not None:
        known = plan.cluster.known.get("link_bytes_per_s", "estimated")
        rate = f"{significant(best / share / 1e9)} GB/s"
        found.append(
            f"the plan takes {rate} between ranks of this machine ({known}): "
            f"{share:.0%} of it were reached, {_verdict(sweep, share)}"
        )
    return found


def _share_reached(plan: Plan, sweep: Sweep) -> float | None:
    """Share of the rate between ranks that the plan takes, where it is for this machine."""
    link = plan.cluster.link_bytes_per_s
    return sweep.best_bytes_per_s / link if link and plan.cluster.is_local else None


def _verdict(sweep: Sweep, share: float | None) -> str | None:
    """As of `paceline preflight`: the plan's rate between CPUs is too rough for one."""
    if share is None or sweep.backend != "nccl":
        return None if share is None else f"no verdict over {sweep.backend}"
    return f"slow: below {SLOW_SHARE:.0%}" if share < SLOW_SHARE else "as expected"


def expected_of(plan: Plan, sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """The rates that the plan takes, the share of them that each sweep reached, and the verdict.

    Returns:
        JSON values: rates in bytes a second; a share of None has its reason beside it.
    """
    cluster = plan.cluster
    names = ("link_bytes_per_s", "network_bytes_per_s")
    found: dict[str, Any] = {name: getattr(cluster, name) for name in names}
    found["known"] = {name: cluster.known.get(name, "estimated") for name in names}
    found["reached"] = shares = [_share_reached(plan, sweep) for sweep in sweeps]
    found["verdict"] = [_verdict(*each) for each in zip(sweeps, shares, strict=True)]
    if None in found["reached"]:
        found["reason"] = (
            "the rate between ranks is unknown"
            if cluster.is_local
            else f"the sweep is of this machine, and the plan for {cluster.name}: "
            "`paceline render JOB --for network` writes the sweep of the cluster"
        )
    return found


def compared_lines(one: Sweep, other: Sweep, names: tuple[str, str]) -> list[str]:
    """Two sweeps of the same ranks size by size, such as over RDMA and over TCP, and how many times
    as long the second takes.

    Raises:
        ValueError: They are of other ranks, or have no size in common.
    """
    if one.world_size != other.world_size:
        raise ValueError(
            f"{counted(one.world_size, 'rank')} and {counted(other.world_size, 'rank')}"
        )
    theirs = {row.bytes: row for row in other.rows}
    pairs = [(row, theirs[row.bytes]) for row in one.rows if row.bytes in theirs]
    if not pairs:
        raise ValueError("they have no size in common")
    rows: list[tuple[str, ...]] = [("size", *names, "times as long")]
    for ours, its in pairs:
        times = (format_seconds(ours.seconds), format_seconds(its.seconds))
        rows.append((format_bytes(ours.bytes), *times, f"{its.seconds / ours.seconds:.2f}"))
    (small, its_small), (large, its_large) = pairs[0], pairs[-1]
    becomes = "longer" if its_large.seconds >= large.seconds else "shorter"
    return [
        f"{counted(one.world_size, 'rank')}, {one.backend} on {one.device}",
        format_table(rows),
        (
            f"{names[1]} takes {its_small.seconds / small.seconds:.2f} times as long for "
            f"{format_bytes(small.bytes)} (latency) and {its_large.seconds / large.seconds:.2f} "
            f"times for {format_bytes(large.bytes)} (bandwidth): a step is {becomes} by as much of "
            "it as its communication is not hidden (`paceline detect`, network.json)"
        ),
    ]


def expected_lines(plan: Plan) -> list[str]:
    """What the plan takes for a cluster that is not this machine, which was measured."""
    cluster = plan.cluster
    rates = {
        "link_bytes_per_s": "between ranks of a node, each rank and direction",
        "network_bytes_per_s": "between nodes, each node and direction",
    }
    found = [f"the job's cluster is {cluster.accelerator}, and not this machine. Its plan expects:"]
    for field, between in rates.items():
        rate = getattr(cluster, field)
        if field == "network_bytes_per_s" and cluster.num_nodes == 1:
            continue
        known = cluster.known.get(field, "estimated")
        said = "unknown" if rate is None else f"{significant(rate / 1e9)} GB/s ({known})"
        found.append(f"  {between}: {said}")
    return found

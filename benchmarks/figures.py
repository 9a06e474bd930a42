"""How the benchmarks say a figure: the machine, n, the middle and the spread."""

import importlib.metadata
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path


def machine() -> str:
    """One line: processor, cores, memory, system, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "paceline"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}; {', '.join(versions)}"
    )


def spread(values: Sequence[float], unit: str = "s", digits: int = 3) -> str:
    """`median 0.052 s, p5-p95 0.050-0.060, min-max 0.049-0.071, n = 20`."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    middle = statistics.median(ordered)
    return (
        f"median {middle:.{digits}f} {unit}, p5-p95 {at(0.05):.{digits}f}-{at(0.95):.{digits}f}, "
        f"min-max {ordered[0]:.{digits}f}-{ordered[-1]:.{digits}f}, n = {len(ordered)}"
    )


def interval(
    pairs: Sequence[tuple[float, float]],
    ratio: Callable[[Sequence[tuple[float, float]]], float],
    resamples: int = 2000,
) -> tuple[float, float, float]:
    """A ratio over paired measurements and its 95 % bootstrap interval, pairs kept together."""
    draw = random.Random(0)
    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return ratio(pairs), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)]


def ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    """Median of the first over the median of the second."""
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)

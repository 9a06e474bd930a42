"""How large DDP's gradient buckets should be.

DDP reduces a bucket as soon as its gradients are there, last layers first, while the backward pass
of earlier layers goes on. Small buckets start early and pay the latency often; large ones leave
much to reduce after the last gradient.
"""

from dataclasses import dataclass
from math import ceil

from paceline.units import format_bytes, format_seconds

MIB = 2**20
DEFAULT_BUCKET_MIB = 25
FIRST_BUCKET_BYTES = MIB
"""DDP's first bucket when `bucket_cap_mb` is left out. Given, the first is as large as the others.

Source: torch 2.13, torch/nn/parallel/distributed.py, `_BucketCapacityConfig`.
"""
_WORTH_IT = 0.01
"""Share of the backward pass that must be saved before another size than the default is advised:
less than the error of the model."""
_SIZES_MIB = (1, 2, 4, 8, 12, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAdvice:
    """A bucket size and what it is thought to save."""

    bucket_cap_mb: int | None
    """For `DistributedDataParallel(bucket_cap_mb=...)`, in MiB; None is to leave it out."""

    exposed_s: float
    """Seconds of reducing that the backward pass does not hide, with the advised size."""

    default_exposed_s: float
    """Exposed seconds of reducing with the default of 25 MiB and a first bucket of 1 MiB."""

    whole_exposed_s: float
    """Exposed seconds of reducing with everything in one bucket: nothing is hidden."""

    reduce_s: float
    """Seconds of reducing in all with the advised size, hidden or not."""

    exposed_by_mib: dict[int, float]
    """Size -> exposed seconds, to be plotted or doubted."""

    reason: str
    flags: dict[str, str]
    """Other arguments of DDP -> what to give them, and why."""


def advise_buckets(
    *,
    gradient_bytes: int,
    backward_s: float,
    ranks: int,
    bytes_per_s: float,
    latency_s: float,
    static: bool = True,
) -> BucketAdvice:
    """The bucket size that leaves the least of the reduction exposed.

    The model: gradients become ready evenly over the backward pass; buckets are reduced one after
    another by a ring, in 2 (n-1) hops of `latency_s` and 2 (n-1)/n of the bucket's bytes over the
    slowest link. Leaves out: that reducing slows the backward pass down, and trees, which have
    fewer hops. Measure before you trust a gain of a few percent.

    Args:
        gradient_bytes: Of one rank: 4 for each parameter in float32.
        backward_s: Of the last micro-batch: with `no_sync` only that one reduces.
        ranks: Data ranks.
        bytes_per_s: Of the slowest link in the ring, one direction.
        latency_s: Of one hop, launch included.
        static: Whether every step uses the same parameters.

    Source: the ring, Patarasuk and Yuan 2009; DDP's buckets, Li et al., arXiv:2006.15704,
    section 3.2.

    >>> advice = advise_buckets(gradient_bytes=500 * 10**6, backward_s=0.1, ranks=64,
    ...                         bytes_per_s=12.5e9, latency_s=20e-6)
    >>> advice.bucket_cap_mb, round(advice.default_exposed_s, 4), round(advice.exposed_s, 4)
    (64, 0.0342, 0.0123)
    """
    if gradient_bytes < 1 or ranks < 1 or not bytes_per_s > 0:
        raise ValueError("gradients, ranks and bandwidth are above 0")
    if backward_s < 0 or latency_s < 0:
        raise ValueError("seconds are not below 0")

    def exposed(size: int, first: int | None = None) -> tuple[float, float]:
        return _exposed(gradient_bytes, backward_s, ranks, bytes_per_s, latency_s, size, first)

    default, default_total = exposed(DEFAULT_BUCKET_MIB * MIB, FIRST_BUCKET_BYTES)
    whole, _ = exposed(gradient_bytes)
    sizes = [size for size in _SIZES_MIB if size * MIB < 2 * gradient_bytes] or [1]
    priced = {size: exposed(size * MIB) for size in sizes}
    best = min(sizes, key=lambda size: (priced[size][0], size))
    gain = default - priced[best][0]
    keep = ranks == 1 or gain <= _WORTH_IT * backward_s
    took, total = (default, default_total) if keep else priced[best]
    return BucketAdvice(
        bucket_cap_mb=None if keep else best,
        exposed_s=took,
        default_exposed_s=default,
        whole_exposed_s=whole,
        reduce_s=total,
        exposed_by_mib={size: priced[size][0] for size in sizes},
        reason=_reason(ranks, keep, best, default, priced[best][0]),
        flags=_flags(gradient_bytes, static),
    )


def _exposed(
    gradient_bytes: int,
    backward_s: float,
    ranks: int,
    bytes_per_s: float,
    latency_s: float,
    size: int,
    first: int | None,
) -> tuple[float, float]:
    """Seconds after the backward pass until the last bucket is reduced, and seconds of reducing."""
    if ranks == 1:
        return 0.0, 0.0
    first = min(first or size, gradient_bytes)
    rest = gradient_bytes - first
    count = ceil(rest / size)
    each = rest / max(1, count)
    first_s, each_s = (
        2 * (ranks - 1) * (latency_s + part / ranks / bytes_per_s) for part in (first, each)
    )
    # Reducing ends as though nothing waited from one bucket on. All but the first are equal, so
    # that one is the first, the second or the last.
    ends = [backward_s * first / gradient_bytes + first_s + count * each_s]
    if count:
        ends.append(backward_s * (first + each) / gradient_bytes + count * each_s)
        ends.append(backward_s + each_s)
    return max(ends) - backward_s, first_s + count * each_s


def _reason(ranks: int, keep: bool, best: int, default: float, least: float) -> str:
    if ranks == 1:
        return "one rank reduces nothing"
    if keep:
        return (
            f"leave it out: {format_seconds(default)} exposed with the default of "
            f"{DEFAULT_BUCKET_MIB} MiB, {format_seconds(least)} with {best} MiB"
        )
    return (
        f"{format_seconds(least)} exposed with {best} MiB, {format_seconds(default)} with the "
        f"default of {DEFAULT_BUCKET_MIB} MiB"
    )


def _flags(gradient_bytes: int, static: bool) -> dict[str, str]:
    return {
        "gradient_as_bucket_view": (
            f"True: gradients live in the buckets, which saves {format_bytes(gradient_bytes)} and "
            "a copy. It does not cause the overlap: that is DDP's default"
        ),
        "static_graph": (
            "True: every step uses the same parameters, so unused ones are looked for once and "
            "reentrant checkpointing works"
            if static
            else "False: which parameters are used changes between steps"
        ),
        "find_unused_parameters": (
            "False: it walks the graph in every step"
            if static
            else "True: without it the reduction waits for gradients that never come"
        ),
    }

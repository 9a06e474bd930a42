"""Products of matrices in every precision that the device multiplies in.

Shape suffixes: M rows, K inner, N columns.
"""

from collections.abc import Callable, Iterator

import torch

from paceline.catalog.measured import ProductTime, SustainedRate
from paceline.runtime._torch_private import SCALED_MM
from paceline.runtime.calibrate.clock import Clock

Shape = tuple[int, int, int]
"""M, K, N."""


def shapes(*, largest: int) -> list[Shape]:
    """Squares, and the products of transformers: tokens by widths, wide, narrow and short.

    Sorted by work, and alike at every size, so that what the time allows is a fair sample.

    >>> len(shapes(largest=1024)) > 20
    True
    """
    found: set[Shape] = set()
    size = 64
    while size <= largest:
        found.add((size, size, size))
        for hidden in (size, size + size // 2):
            found |= {
                (4 * size, hidden, hidden),  # output of attention
                (size, hidden, 4 * hidden),  # into the feed-forward layer
                (size, 4 * hidden, hidden),  # and out of it
                (2 * size, hidden, 3 * hidden),  # queries, keys and values
                (hidden, 4 * size, hidden),  # gradient of a matrix
            }
        found |= {(4 * size, max(16, size // 8), 4 * size), (2 * size, size // 2, size)}
        size *= 2
    return sorted(found, key=lambda shape: shape[0] * shape[1] * shape[2])


def measure_products(
    clock: Clock, device: torch.device, precisions: list[str], skipped: list[str]
) -> list[ProductTime]:
    """Every shape there is time for, in each precision.

    In several rounds, of which the fastest counts: what else the machine does comes and goes.
    """
    largest = 2048 if device.type == "cpu" else 8192
    every = shapes(largest=largest)
    fastest: dict[tuple[str, Shape], ProductTime] = {}
    failed: set[str] = set()
    for number in range(_ROUNDS):
        for position, precision in enumerate(precisions):
            parts_left = (_ROUNDS - number) * len(precisions) - position
            if precision in failed:
                continue
            with clock.part(f"products in {precision}", clock.left_s / parts_left):
                try:
                    for time in _measure_precision(clock, device, precision, every):
                        key = (precision, (time.rows, time.inner, time.columns))
                        if key not in fastest or time.seconds < fastest[key].seconds:
                            fastest[key] = time
                except (RuntimeError, NotImplementedError) as error:
                    # Every rank has the same device, so every rank is refused.
                    failed.add(precision)
                    skipped.append(f"products in {precision}: {str(error).splitlines()[0]}")
    return list(fastest.values())


_ROUNDS = 3


def _measure_precision(
    clock: Clock, device: torch.device, precision: str, every: list[Shape]
) -> Iterator[ProductTime]:
    rate = 0.0
    for position, shape in enumerate(every):
        m, k, n = shape
        share_s = clock.left_s / (len(every) - position)
        # What the last shape reached says which are too large to be worth starting.
        if rate and _TOO_SLOW * 2.0 * m * k * n / rate > clock.left_s:
            continue
        timing = clock.time(product(shape, precision, device), budget_s=_UNUSED * share_s)
        if timing is not None:
            rate = clock.agreed(2.0 * m * k * n / timing.seconds)
            yield ProductTime(
                precision=precision,
                rows=m,
                inner=k,
                columns=n,
                seconds=timing.seconds,
                spread=timing.spread,
                num_repeats=timing.num_repeats,
            )


_UNUSED = 1.5
"""What a shape may take of its part of the time: the small ones before it did not use theirs."""

_TOO_SLOW = 16
"""What the calls of one shape may take at most of the time that is left."""


def measure_sustained(
    clock: Clock, device: torch.device, burst: list[ProductTime]
) -> list[SustainedRate]:
    """One large product in bf16 for as long as this part lasts; its last half is what counts."""
    known = [each for each in burst if each.precision == "bf16"]
    seconds = clock.left_s
    if not known or seconds <= 0.5:
        return []
    best = max(known, key=lambda each: each.rows * each.inner * each.columns)
    call = product((best.rows, best.inner, best.columns), best.precision, device)
    batch = max(1, int(0.1 / best.seconds))
    times = clock.run_for(call, seconds, batch=batch)
    late = times[len(times) // 2 :]
    flops = 2.0 * best.rows * best.inner * best.columns
    return [
        SustainedRate(
            precision=best.precision,
            flops_per_s=flops * len(late) / sum(late),
            burst_flops_per_s=best.flops_per_s,
            seconds=sum(times) * batch,
        )
    ]


def product(shape: Shape, precision: str, device: torch.device) -> Callable[[], object]:
    """A call that multiplies random matrices of this shape.

    Random values, not zeros: a GPU's clock falls with the bits that change.
    """
    m, k, n = shape
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    if precision == "fp8":
        return _scaled(m, k, n, device)
    dtype = _DTYPES[precision]
    left_MK = _random(m, k, device).to(dtype)
    # As a linear layer has its matrix: outputs first.
    right_KN = _random(n, k, device).to(dtype).t()
    out_MN = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(left_MK, right_KN, out=out_MN)


def _scaled(m: int, k: int, n: int, device: torch.device) -> Callable[[], object]:
    left_MK = _random(m, k, device).to(torch.float8_e4m3fn)
    right_KN = _random(n, k, device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    return lambda: SCALED_MM(left_MK, right_KN, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Random values, of which a large tensor has the same ones over and over: drawing them all
    would take longer than multiplying them."""
    count = rows * columns
    drawn = torch.randn(min(count, _DRAWN), device=device)
    return drawn.repeat(-(-count // drawn.numel()))[:count].view(rows, columns)


_DRAWN = 100_003
"""A prime, so that rows differ."""

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

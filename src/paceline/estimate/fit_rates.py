"""The planner's constants of one machine, fitted to what `paceline calibrate` measured there.

Every prediction is made by the planner's own code (`rates_of`, `matmul_s`, `all_gather_s`) from a
trial row of `[efficiencies.NAME]`, so a constant means here what it means in a plan. Fitted by
least squares in the logarithm of time, where 10 % too slow counts the same for a small product as
for a large one; a few times that are far off, as another program ran, count less.

Leaves out: what a whole step loses beside its products (`sustained`), which no loop of products
shows, and everything that overlaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from paceline.catalog.efficiencies import AS_OTHER, Efficiencies, with_measured
from paceline.catalog.engines import Engine
from paceline.catalog.measured import AttentionTime, CollectiveTime, Measurements, ProductTime
from paceline.estimate.collectives import all_gather_s, all_reduce_s
from paceline.estimate.compute import matmul_s
from paceline.estimate.rates import Rates, rates_of, shipped_share
from paceline.profile.block import Block, Column, attention_flops
from paceline.topology import Cluster

Row = dict[str, Any]
"""A table `[efficiencies.NAME]`."""

_HELD_OUT = 4
"""One time in so many is not fitted, and says how wrong the fit is."""

_LEAST = 8
"""Times that a fit of five constants needs; with fewer, nothing is claimed."""

_FAR_OFF = 0.15
"""From here on (15 % off) a time counts by its distance, not the square of it (Huber)."""

_FLASH_BACKWARD_FLOPS = 2.5
"""As in `compute.py`: five products instead of two. Source: Dao, arXiv:2307.08691."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions are off, as a share of the measured time, on what was not fitted."""

    median: float
    p90: float
    num_held_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What the machine reaches, ready to be written as `[efficiencies.NAME]`."""

    accelerator: str
    row: Mapping[str, Any]
    errors: Mapping[str, FitError]
    """Part of the row (`matmul.bf16`, `attention`, `link`, `network`) -> its error."""

    shipped_errors: Mapping[str, FitError]
    """Errors of the shipped constants on the same times, by the same parts."""

    notes: tuple[str, ...]
    """What was measured and not taken over, with the reason."""


def fit_rates(
    measured: Measurements, cluster: Cluster, engine: Engine, shipped: Efficiencies
) -> Fitted:
    """Constants for every part that was measured often enough.

    Args:
        measured: On this machine.
        cluster: The same machine as the planner sees it, with as many ranks.
        engine: Any one; only rates of hardware are fitted.
        shipped: Where a constant starts, and stays if nothing measured says otherwise.
    """
    model = _Model(cluster, engine, shipped)
    row: Row = {}
    errors: dict[str, FitError] = {}
    before: dict[str, FitError] = {}
    notes = list(measured.skipped)
    for kind, times in _by_kind(measured.products).items():
        if kind not in cluster.peak_flops_per_s or len(times) < _LEAST:
            notes.append(f"matmul.{kind}: {len(times)} times, which is too few")
            continue
        constants, errors[f"matmul.{kind}"], before[f"matmul.{kind}"] = _fit_products(
            model, kind, times
        )
        row.setdefault("matmul", {})[AS_OTHER.get(kind, kind)] = constants
    if len(measured.attention) >= 3:
        constants, errors["attention"], before["attention"] = _fit_attention(
            model, measured.attention
        )
        row |= constants
    if measured.memory and cluster.memory_bytes_per_s:
        reached = float(np.median([each.bytes_per_s for each in measured.memory]))
        row["memory_share"] = reached / cluster.memory_bytes_per_s
    for is_inside in (True, False):
        those = [each for each in measured.collectives if each.is_inside_node == is_inside]
        if len(those) >= 6:
            name, constants, after, first = _fit_collectives(model, those, row)
            row |= constants
            errors[name], before[name] = after, first
    notes += _unused(measured)
    return Fitted(
        accelerator=cluster.accelerator,
        row=_rounded(row),
        errors=errors,
        shipped_errors=before,
        notes=tuple(notes),
    )


class _Model:
    """The planner's prediction for a trial row."""

    def __init__(self, cluster: Cluster, engine: Engine, shipped: Efficiencies) -> None:
        self.cluster = cluster
        self.shipped = shipped
        self._engine = engine

    def rates(self, row: Row, precision: str) -> Rates:
        """With nothing taken off for a whole step: what is timed here is a burst."""
        name = self.cluster.accelerator
        tables = with_measured(self.shipped, {name: {"sustained": 1.0, **row}}, accelerator=name)
        tables = replace(tables, sustained_by_precision={})
        rates = rates_of(self.cluster, self._engine, precision, tables)
        assert rates is not None, "a machine without a peak is refused before it is measured"
        return rates

    @property
    def wide(self) -> str:
        """The precision whose peak attention's rate is a share of."""
        return "bf16" if "bf16" in self.cluster.peak_flops_per_s else "fp32"


def _by_kind(products: Sequence[ProductTime]) -> dict[str, list[ProductTime]]:
    """By precision; one that shares its constants with another (fp16, tf32) only in its stead."""
    found: dict[str, list[ProductTime]] = {}
    for each in products:
        found.setdefault(each.precision, []).append(each)
    return {
        kind: times
        for kind, times in found.items()
        if kind not in AS_OTHER or AS_OTHER[kind] not in found
    }


def _fit_products(
    model: _Model, kind: str, times: Sequence[ProductTime]
) -> tuple[Row, FitError, FitError]:
    usual = model.shipped.matmul_of(model.cluster.accelerator, kind)
    m, k, n = (
        np.array([getattr(each, name) for each in times], float)
        for name in ("rows", "inner", "columns")
    )
    # Tiles and waves are a GPU's: a CPU has as many threads as it needs for any shape.
    waves = model.cluster.num_multiprocessors is not None
    names = ["share", "short_k", "launch_s", "memory_share", *(["wave"] if waves else [])]
    floors = {"share": 0.01, "short_k": 1.0, "launch_s": 1e-7, "memory_share": 0.01, "wave": 0.01}
    start = {name: max(getattr(usual, name), floors[name]) for name in names}

    def row_of(values: Mapping[str, float]) -> Row:
        return {name: values.get(name, 0.0) for name in (*names, "wave")}

    def predict(values: Mapping[str, float]) -> Column:
        row = {"matmul": {AS_OTHER.get(kind, kind): row_of(values)}}
        found: Column = matmul_s(m, k, n, model.rates(row, kind).matmul)
        return found

    shipped = matmul_s(m, k, n, model.rates({}, kind).matmul)
    values, error = _fit(predict, start, times)
    return row_of(values), error, _error(shipped, times)


def _fit_attention(model: _Model, times: Sequence[AttentionTime]) -> tuple[Row, FitError, FitError]:
    """A share for each kernel, and one half length and one backward share for all."""
    shipped = model.shipped
    usual = model.rates({}, model.wide)
    kernels = list(dict.fromkeys(each.kernel for each in times))
    flops = np.array([_attention_flops(each) for each in times])
    length = np.array([each.seq_len for each in times], float)
    peak = model.cluster.peak_flops_per_s[model.wide]
    names = [_ATTENTION[kernel][0] for kernel in kernels]
    which = np.array([kernels.index(each.kernel) for each in times])

    def predict(values: Mapping[str, float]) -> Column:
        share = np.array([values[name] for name in names])[which]
        return np.asarray(flops / (peak * share * length / (length + values["half"])))

    start = {name: shipped.attention[name] for name in names}
    start["half"] = max(float(usual.attention_half_len), 10.0)
    forward = [_Seconds(each.forward_s, each.spread) for each in times]
    values, error = _fit(predict, start, forward)
    old = {name: shipped.attention[name] for name in names}
    before = predict({**old, "half": float(usual.attention_half_len)})
    row: Row = {
        name: values[names[kernels.index(kernel)]]
        for kernel in kernels
        for name in _ATTENTION[kernel]
    }
    row["attention_half_len"] = values["half"] if values["half"] > 1 else 0.0
    row["backward"] = float(
        np.median([_FLASH_BACKWARD_FLOPS * each.forward_s / each.backward_s for each in times])
    )
    return row, error, _error(before, forward)


_ATTENTION = {
    "flash2": ("flash2", "flash1"),
    "flash3": ("flash3",),
    "any": ("flash2", "flash1", "flash3"),
}
"""Measured kernel -> the names that it stands for. FlashAttention 1 is gone from PyTorch."""


def _attention_flops(time: AttentionTime) -> float:
    block = Block(
        name="attention",
        count=1,
        hidden=time.heads * time.head_dim,
        heads=time.heads,
        kv_heads=time.heads,
        head_dim=time.head_dim,
        value_dim=time.head_dim,
    )
    return float(attention_flops(block, time.seq_len) * time.samples)


def _fit_collectives(
    model: _Model, times: Sequence[CollectiveTime], row: Row
) -> tuple[str, Row, FitError, FitError]:
    """Share and latency of the link that the planner thinks these ranks talk over."""
    degree, is_gloo = times[0].num_ranks, model.cluster.backend == "gloo"
    level = next(each for each in model.cluster.levels if is_gloo or degree <= each.size)
    name = "network" if level.name == "network" else "link"
    payload = np.array([each.num_bytes for each in times], float)
    is_all_reduce = np.array([each.kind == "all_reduce" for each in times])
    keys = ("gloo_share" if is_gloo else f"{name}_share", f"{name}_latency_s")
    own = {key: row[key] for key in row if key.startswith("link_")}

    def predict(values: Mapping[str, float]) -> Column:
        rates = model.rates({**own, **values}, model.wide)
        reduced = all_reduce_s(payload, degree, 1, rates)
        return np.where(is_all_reduce, reduced, all_gather_s(payload, degree, 1, rates))

    share = model.shipped.step["gloo_share"] if is_gloo else shipped_share(level)
    start = {keys[0]: share, keys[1]: level.latency_s}
    before = _error(predict({}), times)
    # Small payloads show the latency, large ones the rate, which decides most of a step.
    weight = np.clip((payload / _LARGE_BYTES) ** 2, _LEAST_WEIGHT, 1.0)
    # One share stands for collectives that differ: their geometric mean, not whichever kind there
    # is more of.
    values, error = _fit(predict, start, times, weight, far_off=1.0)
    return name, dict(values), error, before


_LARGE_BYTES = 4e6
"""Payload whose time is mostly bytes: on 8 H100 as long as the start and the hops take."""

_LEAST_WEIGHT = 0.03
"""Least weight of a payload in the fit: small payloads are all that shows the latency."""


@dataclass(frozen=True, slots=True)
class _Seconds:
    seconds: float
    spread: float


_Times = Sequence[ProductTime] | Sequence[CollectiveTime] | Sequence[_Seconds]


def _fit(
    predict: Callable[[Mapping[str, float]], Column],
    start: Mapping[str, float],
    times: _Times,
    weight: Column | None = None,
    far_off: float = _FAR_OFF,
) -> tuple[dict[str, float], FitError]:
    """Constants from all times, and the error of those from three in four on the others."""
    number = np.arange(len(times))
    steady = np.array([1 / (1 + (each.spread / _UNSTEADY) ** 2) for each in times])
    trust = steady if weight is None else weight
    held_out = number % _HELD_OUT == _HELD_OUT // 2
    if held_out.sum() >= 2:
        some = _least_squares(predict, start, times, np.where(held_out, 0.0, trust), far_off)
        error = _error(predict(some), times, held_out)
    else:
        error = FitError(median=float("nan"), p90=float("nan"), num_held_out=0)
    return _least_squares(predict, start, times, trust, far_off), error


def _error(predicted: Column, times: _Times, chosen: Column | None = None) -> FitError:
    seconds = np.array([each.seconds for each in times])
    off = np.abs(predicted / seconds - 1)
    off = off if chosen is None else off[chosen]
    return FitError(
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        num_held_out=len(off) if chosen is not None else 0,
    )


_PRIOR = 0.01
"""Weight of staying where a constant starts, against one time that is off by a factor of e: what
the times do not show stays as shipped."""

_UNSTEADY = 0.1
"""A time whose repeats differ by this share counts half."""

_MOST_ROUNDS = 200


def _least_squares(
    predict: Callable[[Mapping[str, float]], Column],
    start: Mapping[str, float],
    times: _Times,
    trust: Column,
    far_off: float,
) -> dict[str, float]:
    """Levenberg and Marquardt's method in the logarithms of constants and times."""
    names = list(start)
    seconds = np.log([each.seconds for each in times])
    begin = np.array([log(start[name]) for name in names])

    def rest(x: Column) -> Column:
        values = {name: exp(each) for name, each in zip(names, x, strict=True)}
        return np.log(predict(values)) - seconds

    def weights(off: Column) -> Column:
        return trust * np.minimum(1.0, far_off / np.maximum(np.abs(off), 1e-9))

    def cost(off: Column, x: Column) -> float:
        far = np.abs(off)
        huber = np.where(far < far_off, far**2, 2 * far_off * far - far_off**2)
        return float((trust * huber).sum() + _PRIOR**2 * ((x - begin) ** 2).sum())

    x, off, damping = begin.copy(), rest(begin), 1e-2
    for _ in range(_MOST_ROUNDS):
        slopes = np.stack([(rest(x + step) - off) / _STEP for step in _STEP * np.eye(len(x))], 1)
        weighed = slopes * weights(off)[:, None]
        normal = weighed.T @ slopes + _PRIOR**2 * np.eye(len(x))
        gradient = weighed.T @ off + _PRIOR**2 * (x - begin)
        scale = np.diag(np.diag(normal))
        move = np.clip(-np.linalg.solve(normal + damping * scale, gradient), -1.0, 1.0)
        after = rest(x + move)
        if cost(after, x + move) < cost(off, x):
            x, off, damping = x + move, after, damping / 3
            if np.abs(move).max() < 1e-5:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return {name: exp(each) for name, each in zip(names, x, strict=True)}


_STEP = 1e-4


def _unused(measured: Measurements) -> list[str]:
    """What was measured and is not written."""
    notes = [
        f"a loop of {each.seconds:.0f} s in {each.precision} reaches "
        f"{each.flops_per_s / each.burst_flops_per_s:.3f} of the burst; `sustained` also has what "
        "a whole step loses, so it is left as shipped"
        for each in measured.sustained
    ]
    kinds = {each.precision for each in measured.products}
    notes += [
        f"{kind} was measured, and is planned for with the constants of {AS_OTHER[kind]}"
        for kind in sorted(kinds)
        if kind in AS_OTHER and AS_OTHER[kind] in kinds
    ]
    return notes


def _rounded(row: Row) -> Row:
    """Four digits: a fit knows no more."""
    return {
        key: _rounded(value) if isinstance(value, dict) else float(f"{value:.4g}")
        for key, value in row.items()
    }

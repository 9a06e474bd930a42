"""The page's curves as SVG text: loss by step, loss by time, throughput by time.

Drawn by matplotlib in placeholder colours which become the page's CSS variables, so one picture
serves light and dark, and with text as text in the page's own fonts. Every curve comes in a wide
and a narrow form; the page shows the one that fits.

Leaves out: bars, which are HTML (`page.py`).
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from paceline.units import format_count, format_seconds

_COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "train": "#040404",
    "raw": "#050505",
    "held": "#060606",
    "base": "#070707",
    "bad": "#080808",
    "shade": "#090909",
}
"""CSS variable of the page -> the placeholder it is drawn in."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "DejaVu Sans",  # comes with matplotlib; only measures, the page's font shows
    "font.size": 12,
    "text.color": _COLORS["muted"],
    "axes.labelcolor": _COLORS["muted"],
    "axes.edgecolor": _COLORS["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _COLORS["line"],
    "grid.linewidth": 0.8,
    "xtick.color": _COLORS["line"],
    "xtick.labelcolor": _COLORS["muted"],
    "ytick.left": False,
    "ytick.labelcolor": _COLORS["muted"],
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "savefig.bbox": None,
}

_LOG_RATIO = 30.0
"""A loss that spans more than this is drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve in both forms, as inline SVG."""

    wide: str
    narrow: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A failure, or another moment worth a vertical line."""

    x: float
    label: str
    until: float
    """Where the shade that starts at `x` ends; `x` for none."""

    is_bad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LossData:
    """What a loss curve is drawn from. NaN breaks a line."""

    x: Sequence[float]
    loss: Sequence[float]
    breaks: Sequence[int] = ()
    """Indices where the line starts anew."""

    held_x: Sequence[float] = ()
    held_loss: Sequence[float] = ()
    baseline: float | None = None
    baseline_name: str = ""
    marks: Sequence[Mark] = ()
    shades: Sequence[tuple[float, float]] = ()
    """Stretches of the x axis that were done again."""

    refused_x: Sequence[float] = ()


def draw_loss(data: LossData, *, name: str, label: str, by_time: bool) -> Curve:
    """Training loss thin and smoothed, held-out points, the baseline dashed."""

    def paint(axes: Any, buckets: int) -> None:
        _paint_line(axes, data.x, data.loss, data.breaks, buckets, raw="raw", smooth="train")
        if data.held_x:
            style = {"color": _COLORS["held"], "marker": "o", "markersize": 5.5}
            style["linewidth"] = 0 if by_time else 1.4
            axes.plot(data.held_x, data.held_loss, zorder=5, **style)
        if data.baseline is not None:
            axes.axhline(data.baseline, color=_COLORS["base"], linewidth=1.3, dashes=(5, 4))
            axes.annotate(
                f"{data.baseline_name} {data.baseline:.2f}",
                (0, data.baseline),
                xycoords=("axes fraction", "data"),
                xytext=(4, 5),  # on the left, where the loss is still far above
                textcoords="offset points",
                color=_COLORS["base"],
                parse_math=False,
            )
        for start, end in data.shades:
            axes.axvspan(start, end, color=_COLORS["shade"], alpha=0.16, linewidth=0)
        finite = [
            value
            for value in (*data.loss, *data.held_loss, data.baseline or math.nan)
            if math.isfinite(value)
        ]
        if finite and min(finite) > 0 and max(finite) / min(finite) > _LOG_RATIO:
            axes.set_yscale("log")
        if data.refused_x:
            axes.plot(
                _thinned(data.refused_x, 200),
                [0.03] * min(200, len(data.refused_x)),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker="x",
                markersize=6,
                color=_COLORS["bad"],
            )
        _limit_x(axes, (*data.x, *data.held_x), data.marks, from_zero=by_time)
        _paint_marks(axes, data.marks, narrow=buckets < 300)
        _time_ticks(axes) if by_time else _step_ticks(axes)

    return _both(paint, name, label, height=1.0)


def draw_throughput(
    x: Sequence[float],
    rate: Sequence[float],
    breaks: Sequence[int],
    marks: Sequence[Mark],
    *,
    median: float | None,
    name: str,
    label: str,
) -> Curve:
    """Rate over running time from zero, its median dashed."""

    def paint(axes: Any, buckets: int) -> None:
        _paint_line(axes, x, rate, breaks, buckets, raw="raw", smooth="train")
        if median is not None:
            style = {"color": _COLORS["base"], "linewidth": 1.3, "dashes": (5, 4)}
            axes.axhline(median, zorder=1, **style)
        finite = sorted(value for value in rate if math.isfinite(value))
        if finite:
            axes.set_ylim(0, max(finite[-1] * 1.08, 1e-12))
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value) if value else "0")
        _limit_x(axes, x, marks, from_zero=True)
        _paint_marks(axes, marks, narrow=buckets < 300)
        _time_ticks(axes)

    return _both(paint, name, label, height=0.72)


def draw_scaling(ranks: Sequence[int], rate: Sequence[float], *, name: str, label: str) -> Curve:
    """Rate by number of ranks from zero; dashed, the fewest ranks' rate for each rank."""

    def paint(axes: Any, buckets: int) -> None:
        ideal = [rate[0] * count / ranks[0] for count in ranks]
        style = {"color": _COLORS["base"], "linewidth": 1.3, "dashes": (5, 4)}
        axes.plot(ranks, ideal, zorder=1, **style)
        axes.plot(ranks, rate, color=_COLORS["train"], linewidth=1.9, marker="o", markersize=6)
        axes.set_ylim(0, max(*ideal, *rate) * 1.08)
        axes.set_xticks(list(ranks), [f"{count:,}" for count in ranks])
        axes.set_xlabel("ranks")
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value) if value else "0")

    return _both(paint, name, label, height=0.8)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of about `window` values around each, of fewer near the ends: it does not lag.

    NaN stays NaN and has no weight.

    >>> smoothed([1.0, 2.0, 6.0, 2.0], 3)
    [1.0, 3.0, 3.3333333333333335, 2.0]
    """
    sums, counts = [0.0], [0]
    for value in values:
        is_known = math.isfinite(value)
        sums.append(sums[-1] + (value if is_known else 0.0))
        counts.append(counts[-1] + is_known)
    out = []
    for i, value in enumerate(values):
        reach = max(window // 4, min(window // 2, i, len(values) - 1 - i))
        low, high = max(0, i - reach), min(len(values), i + reach + 1)
        mean = (sums[high] - sums[low]) / max(1, counts[high] - counts[low])
        out.append(mean if math.isfinite(value) else math.nan)
    return out


def extremes(
    x: Sequence[float], y: Sequence[float], buckets: int
) -> tuple[list[float], list[float]]:
    """The lowest and highest point of each of `buckets` stretches, in order: spikes stay."""
    if len(x) <= 2 * buckets:
        return list(x), list(y)
    out_x: list[float] = []
    out_y: list[float] = []
    for bucket in range(buckets):
        start, end = bucket * len(x) // buckets, (bucket + 1) * len(x) // buckets
        known = [i for i in range(start, end) if math.isfinite(y[i])]
        if not known:
            picks = [start]
        else:
            picks = sorted({min(known, key=y.__getitem__), max(known, key=y.__getitem__)})
        out_x += [x[i] for i in picks]
        out_y += [y[i] for i in picks]
    return out_x, out_y


def _paint_line(
    axes: Any,
    x: Sequence[float],
    y: Sequence[float],
    breaks: Sequence[int],
    buckets: int,
    *,
    raw: str,
    smooth: str,
) -> None:
    """The values thin, and their smoothed course where there are enough; a dot for a lone one."""
    window = max(9, len(x) // 20)
    is_long = len(x) >= 30
    for start, end in zip([0, *breaks], [*breaks, len(x)], strict=True):
        share = max(8, buckets * (end - start) // max(1, len(x)))
        part_x, part_y = x[start:end], y[start:end]
        thin_x, thin_y = extremes(part_x, part_y, share)
        if is_long:
            axes.plot(thin_x, thin_y, color=_COLORS[raw], linewidth=0.8, alpha=0.45)
            part_y = smoothed(part_y, window)
        axes.plot(*extremes(part_x, part_y, share // 2), color=_COLORS[smooth], linewidth=1.9)
        lone = list(_lone(part_y))[:200]
        style = {"linestyle": "none", "marker": "o", "markersize": 4, "color": _COLORS[smooth]}
        axes.plot([part_x[i] for i in lone], [part_y[i] for i in lone], **style)


def _lone(y: Sequence[float]) -> Iterable[int]:
    """Points with no neighbour, which a line does not show."""
    known = [False, *map(math.isfinite, y), False]
    for i in range(len(y)):
        if known[i + 1] and not known[i] and not known[i + 2]:
            yield i


def _paint_marks(axes: Any, marks: Sequence[Mark], *, narrow: bool) -> None:
    """Vertical lines; labelled in full when few, by number when several, not at all when many."""
    in_full = len(marks) <= 3 and not narrow
    low, high = axes.get_xlim()
    number = 0
    for row, mark in enumerate(marks):
        number += mark.is_bad
        color = _COLORS["bad" if mark.is_bad else "muted"]
        style = "solid" if mark.is_bad else (0, (1, 3))
        axes.axvline(mark.x, color=color, linewidth=1.3, linestyle=style, zorder=4)
        if mark.until > mark.x:
            axes.axvspan(mark.x, mark.until, color=_COLORS["shade"], alpha=0.16, linewidth=0)
        if len(marks) > 12:
            continue
        is_right = mark.x > low + 0.55 * (high - low)
        axes.annotate(
            mark.label if in_full else str(number) if mark.is_bad else "",
            (mark.x if is_right else max(mark.x, mark.until), 1),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if is_right else 5, -3 - (15 * row if in_full else 0)),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="top",
            color=color,
            zorder=6,
            parse_math=False,
        )


def _limit_x(axes: Any, x: Iterable[float], marks: Sequence[Mark], *, from_zero: bool) -> None:
    reach = [*x, *(mark.x for mark in marks), *(mark.until for mark in marks)]
    low, high = (min(reach), max(reach)) if reach else (0.0, 1.0)
    low = 0.0 if from_zero else min(low, high - 1)
    pad = (high - low or 1) * 0.015
    axes.set_xlim(low - pad, high + pad)


def _step_ticks(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _time_ticks(axes: Any) -> None:
    """About six ticks at times a clock has."""
    low, high = axes.get_xlim()
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
    want = (high - low) / 6
    step = next((float(s) for s in steps if s >= want), 86400.0 * math.ceil(want / 86400))
    if want < 0.5:
        step = 10 ** math.floor(math.log10(want) + 1)
    ticks = [i * step for i in range(int(high / step) + 1)]
    axes.set_xticks(ticks, [format_seconds(tick) if tick else "0" for tick in ticks])


def _thinned(values: Sequence[float], most: int) -> list[float]:
    if len(values) <= most:
        return list(values)
    return [values[i * len(values) // most] for i in range(most)]


def _both(paint: Callable[[Any, int], None], name: str, label: str, *, height: float) -> Curve:
    return Curve(
        wide=_svg(paint, f"{name}-w", label, width=760, height=round(290 * height), buckets=600),
        narrow=_svg(paint, f"{name}-n", label, width=370, height=round(250 * height), buckets=260),
    )


def _svg(
    paint: Callable[[Any, int], None],
    name: str,
    label: str,
    *,
    width: int,
    height: int,
    buckets: int,
) -> str:
    """One figure, `width` x `height` CSS pixels at its natural size."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        axes.margins(x=0.01, y=0.08)
        paint(axes, buckets)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return _inline(out.getvalue(), name, label)


def _inline(svg: str, name: str, label: str) -> str:
    """The bare `<svg>` element: page colours, page fonts, ids of its own, no outside address."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|xlink:href=\"#)([^)\"]+)", svg))

    def rename(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', rename, svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    for variable, placeholder in _COLORS.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    svg = re.sub(r"font: ([\d.]+px) '[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', _rounded, svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    kind = "wide" if name.endswith("-w") else "narrow"
    head = f'<svg class="{kind}" {box[0]} role="img" aria-label="{label}">'
    return re.sub(r"^<svg[^>]*>", head, svg, count=1).strip()


def _rounded(match: re.Match[str]) -> str:
    """A tenth of a pixel is enough."""
    return re.sub(r"(\d\.\d)\d+", r"\1", match[0])

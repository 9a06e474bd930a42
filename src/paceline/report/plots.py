"""A bench's curve as SVG text.

Drawn by matplotlib in placeholder colours which become the page's CSS variables, so one picture
serves light and dark, and with text as text in the page's own fonts. Every curve comes in a wide
and a narrow form; the page shows the one that fits. A run's curves are drawn in the browser
(`static/page.js`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from paceline.units import format_count

_COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "train": "#040404",
    "base": "#070707",
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


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve in both forms, as inline SVG."""

    wide: str
    narrow: str


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

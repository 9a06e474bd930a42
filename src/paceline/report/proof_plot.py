"""The memory of a step as one SVG picture that stands alone: one line a pipeline stage."""

from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from paceline.prove.proof import Proof, StageProof

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}
_GIB = 2**30
_MOST_LABELS = 8
_PHASES = {"forward": "#e8f1fb", "loss": "#fbe8e8", "backward": "#fdf3e1", "optimizer": "#e9f6e9"}


def draw_memory(proof: Proof) -> str:
    """An SVG file's text: bytes in living tensors over the step, phases shaded for one stage."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        if len(proof.stages) == 1:
            _shade_phases(axes, proof.stages[0])
        for stage in proof.stages:
            _draw_stage(axes, stage, labelled=1 < len(proof.stages) <= _MOST_LABELS)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("GiB in living tensors")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel(
            "share of the step's simulated time" if proof.simulated else "share of the step"
        )
        axes.set_title(proof.layout.name, loc="left")
        if 1 < len(proof.stages) <= _MOST_LABELS:
            axes.legend(frameon=False)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_stage(axes: Any, stage: StageProof, *, labelled: bool) -> None:
    at = [point.at for point in stage.timeline]
    sizes = [point.bytes / _GIB for point in stage.timeline]
    label = f"stage {stage.stage}, rank {stage.rank}" if labelled else None
    (line,) = axes.plot(at, sizes, linewidth=1.4, label=label)
    highest = max(range(len(sizes)), key=sizes.__getitem__)
    axes.plot(at[highest], sizes[highest], "o", color=line.get_color(), markersize=5)
    axes.annotate(
        f"{sizes[highest]:.2f}",
        (at[highest], sizes[highest]),
        xytext=(5, 4),
        textcoords="offset points",
        color=line.get_color(),
    )


def _shade_phases(axes: Any, stage: StageProof) -> None:
    """Each phase behind the line, named where it is wide enough."""
    begin, phase = 0.0, stage.timeline[0].phase
    for point in (*stage.timeline[1:], None):
        if point is not None and point.phase == phase:
            continue
        end = 1.0 if point is None else point.at
        axes.axvspan(begin, end, color=_PHASES.get(phase, "#f4f4f4"), linewidth=0)
        if end - begin > 0.08:
            middle = (begin + end) / 2
            axes.annotate(
                phase, (middle, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom"
            )
        if point is not None:
            begin, phase = end, point.phase

"""The same tiny job for every engine that runs here: same model, data, seed and batch."""

from typing import Any

from tests.render.plans import rendered

from paceline.render import Rendered


def tiny(
    engine: str,
    ranks: int,
    *,
    nodes: int = 1,
    accelerator: str = "H100-SXM",
    precision: str = "fp32",
    **layout: Any,
) -> Rendered:
    """The files of an engine for six steps on `ranks` ranks of each node, with the layout's fields
    fixed."""
    return rendered(
        engine,
        model={"decoder": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}},
        data={"seq_len": 32},
        cluster={"accelerator": accelerator, "nodes": nodes, "per_node": ranks},
        train={
            "global_batch": 16,
            "steps": 6,
            "precision": precision,
            "schedule": "constant",
            "learning_rate": 0.003,
        },
        layout={"micro_batch": 2} | layout,
        checkpoint={"every": 3},
    )

"""How a layout is carried out: the same code that `prove` dry-runs, `run` runs, `verify` compares.

Imports nothing of ours below `parallel/`, so that `prove` may use it.
"""

from paceline.runtime.strategy.apply import (
    apply,
    make_mesh,
    repeated_blocks,
    saved_buffers,
    send_buffers,
)
from paceline.runtime.strategy.gradients import (
    clip_gradients,
    gradient_norm,
    scale_gradients,
    set_gradient_sync,
)
from paceline.runtime.strategy.precision import Precision, autocast

__all__ = [
    "Precision",
    "apply",
    "autocast",
    "clip_gradients",
    "gradient_norm",
    "make_mesh",
    "repeated_blocks",
    "saved_buffers",
    "scale_gradients",
    "send_buffers",
    "set_gradient_sync",
]

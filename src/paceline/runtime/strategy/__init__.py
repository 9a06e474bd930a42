"""How a layout is carried out: the same code that `prove` dry-runs, `run` runs, `verify` compares.

Imports nothing of ours below `parallel/`, so that `prove` may use it.
"""

from paceline.choices import Precision
from paceline.profile.ways import Ways
from paceline.runtime.strategy.apply import Options, apply, options_of, rejoin
from paceline.runtime.strategy.blocks import repeated_blocks
from paceline.runtime.strategy.context.attention import attention, positions
from paceline.runtime.strategy.data.shard import finish_gradients, loss_factor, set_gradient_sync
from paceline.runtime.strategy.gradients import (
    clip_factor,
    gradient_norm,
    scale_gradients,
)
from paceline.runtime.strategy.initial import SavedBuffers, saved_buffers, send_buffers
from paceline.runtime.strategy.local import local_of
from paceline.runtime.strategy.mesh import Meshes, clear_dtensor_caches, make_meshes
from paceline.runtime.strategy.precision import (
    LossScaler,
    autocast,
    check_precision,
    set_up_precision,
)
from paceline.runtime.strategy.tensor.split import loss_context
from paceline.runtime.strategy.train import (
    IGNORED,
    Batch,
    LabelLoss,
    Losses,
    LossOf,
    Phase,
    Uneven,
    evaluate,
    forward_backward,
    next_token_loss,
    on_device,
)
from paceline.runtime.strategy.ways.find import ways_of

__all__ = [
    "IGNORED",
    "Batch",
    "LabelLoss",
    "LossOf",
    "LossScaler",
    "Losses",
    "Meshes",
    "Options",
    "Phase",
    "Precision",
    "SavedBuffers",
    "Uneven",
    "Ways",
    "apply",
    "attention",
    "autocast",
    "check_precision",
    "clear_dtensor_caches",
    "clip_factor",
    "evaluate",
    "finish_gradients",
    "forward_backward",
    "gradient_norm",
    "local_of",
    "loss_context",
    "loss_factor",
    "make_meshes",
    "next_token_loss",
    "on_device",
    "options_of",
    "positions",
    "rejoin",
    "repeated_blocks",
    "saved_buffers",
    "scale_gradients",
    "send_buffers",
    "set_gradient_sync",
    "set_up_precision",
    "ways_of",
]

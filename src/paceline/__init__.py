"""Paceline plans, runs and rescues distributed training.

In a training script of your own, `paceline.log(loss=loss, step=step)` records its steps,
`paceline.all_ranks_agree(is_good)` decides for all ranks together, and
`paceline.replicas_differ(model)` compares the copies that they hold.
"""

from typing import TYPE_CHECKING, Any

from paceline.integrations.log import log

if TYPE_CHECKING:
    from paceline.runtime.agree import all_ranks_agree, replicas_differ

__version__ = "0.1.0"
__all__ = ["all_ranks_agree", "log", "replicas_differ"]


def __getattr__(name: str) -> Any:
    if name in ("all_ranks_agree", "replicas_differ"):  # torch, which nobody else here needs
        from paceline.runtime import agree

        return getattr(agree, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

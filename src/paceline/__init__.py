"""Paceline plans, runs and rescues distributed training.

In a training script of your own, `paceline.log(loss=loss, step=step)` records its steps, and
`paceline.all_ranks_agree(is_good)` decides for all ranks together.
"""

from typing import TYPE_CHECKING, Any

from paceline.integrations.log import log

if TYPE_CHECKING:
    from paceline.runtime.agree import all_ranks_agree

__version__ = "0.1.0"
__all__ = ["all_ranks_agree", "log"]


def __getattr__(name: str) -> Any:
    if name == "all_ranks_agree":  # imports torch, which nobody else here needs
        from paceline.runtime.agree import all_ranks_agree

        return all_ranks_agree
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

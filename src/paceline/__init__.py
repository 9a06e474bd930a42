"""Paceline plans, runs and rescues distributed training.

In a training script of your own, `paceline.log(loss=loss, step=step)` records its steps.
"""

from paceline.integrations.log import log

__version__ = "0.1.0"
__all__ = ["log"]

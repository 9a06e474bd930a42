"""Save and restore the state of training, on top of torch.distributed.checkpoint."""

from paceline.runtime.checkpoint.checkpointer import Checkpointer
from paceline.runtime.checkpoint.restore import Restored, load, restore_newest
from paceline.runtime.checkpoint.write import Saved, SaveFailed

__all__ = ["Checkpointer", "Restored", "SaveFailed", "Saved", "load", "restore_newest"]

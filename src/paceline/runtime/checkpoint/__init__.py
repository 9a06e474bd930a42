"""Save and restore the state of training, on top of torch.distributed.checkpoint."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runtime.checkpoint.checkpointer import Checkpointer
    from paceline.runtime.checkpoint.restore import Restored, load, restore_newest
    from paceline.runtime.checkpoint.write import Saved, SaveFailed

__all__ = ["Checkpointer", "Restored", "SaveFailed", "Saved", "load", "restore_newest"]

_WHERE = {
    "Checkpointer": "checkpointer",
    "Restored": "restore",
    "SaveFailed": "write",
    "Saved": "write",
    "load": "restore",
    "restore_newest": "restore",
}


def __getattr__(name: str) -> Any:
    """These bring torch with them, which the process that writes (`writer.py`) does without."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

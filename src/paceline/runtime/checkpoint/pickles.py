"""Read pickles that somebody else wrote, without running anything in them.

torch's `weights_only` builds tensors, containers and numbers. The settings that trainers keep
beside them (argparse's, Megatron's and DeepSpeed's own classes) become `Settings`, which hold their
fields and no code. A file that names any other function or class is refused with that name.
"""

import io
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from paceline.errors import CheckpointError
from paceline.runtime._torch_private import table_classes

_LIBRARIES = (
    *("argparse", "numpy", "megatron", "deepspeed", "transformers", "accelerate", "peft"),
    *("transformer_engine", "enum", "pathlib", "datetime"),
)
"""Packages whose classes in a pickle become `Settings`: nothing of them is imported or called."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""In the message of `weights_only`, which also reads the form from before torch 1.6."""


_TABLE = {
    **table_classes(),
    "collections.OrderedDict": dict,
    **dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), PurePosixPath),
}


class Settings:
    """Stands for an object whose class is not loaded: its fields, or what it was made of."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        fields = state if isinstance(state, dict) else {"state": state}
        self.__dict__.update(fields)


def read_pickle(path: Path) -> Any:
    """What a file of `torch.save` holds; its tensors are mapped into memory.

    Raises:
        CheckpointError: `C015`, it names code; `M012`, it is damaged, or no such file.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return _load(path, is_zip, get_unsafe_globals_in_checkpoint(path) if is_zip else [])
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - torch has no one class for a file that is cut off
        reason = "torch.save did not write it, or it is cut off"
        if isinstance(error, PermissionError | FileNotFoundError):
            reason = str(error.strerror)
        elif "torchscript" in str(error):
            reason = "it is a TorchScript program, not a state_dict"
        raise CheckpointError.of(
            code="M012",
            what=f"{path.name} cannot be read: {reason}",
            where=str(path),
            fix="copy or download the file again; it has to be one that torch.save wrote",
        ) from None


def _load(path: Path, is_zip: bool, names: list[str]) -> Any:
    _refuse(path, [each for each in names if each.partition(".")[0] not in _LIBRARIES])
    try:
        with safe_globals([(Settings, name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except pickle.UnpicklingError as error:
        more = [each for each in _REFUSED.findall(str(error)) if each not in names]
        if not more:
            raise
        return _load(path, is_zip, [*names, *more])


def read_table(path: Path) -> dcp.Metadata:
    """The table of contents (`.metadata`) of a torch.distributed.checkpoint folder.

    Raises:
        CheckpointError: `C015`, it names code; `M012`, it is damaged.
    """
    file = path / ".metadata"
    try:
        return decode_table(file.read_bytes())
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - nor pickle
        raise CheckpointError.of(
            code="M012",
            what=f".metadata of {path.name} cannot be read: "
            + str(getattr(error, "strerror", None) or error),
            where=str(file),
            fix="copy the folder again; without its table nothing in it can be found",
        ) from None


def decode_table(content: bytes) -> dcp.Metadata:
    """The table of contents in the bytes of a `.metadata`; only torch's own classes are made.

    Raises:
        CheckpointError: `C015`, it names code.
        UnpicklingError: It is damaged, or something else.
    """
    found = _Table(io.BytesIO(content)).load()
    if not isinstance(found, dcp.Metadata):
        raise pickle.UnpicklingError("it holds something else")
    return found


class _Table(pickle.Unpickler):
    """Builds the classes of torch's table and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _TABLE.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype | torch.layout) else None
        if found is None:
            _refuse(Path(".metadata"), [f"{module}.{name}"])
        return found


def _refuse(path: Path, names: list[str]) -> None:
    """
    Raises:
        CheckpointError: `C015`, there are names.
    """
    if names:
        raise CheckpointError.of(
            code="C015",
            what=f"{path.name} is a pickle that names {', '.join(sorted(names)[:5])}: reading it "
            "would run that code, and nothing of it was read",
            where=str(path),
            fix="if you trust who wrote it, load it in their program and save its state_dict: "
            "torch.save(model.state_dict(), ...), or save_file of safetensors",
        )

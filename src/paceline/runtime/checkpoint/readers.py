"""Which reader takes which form of weights."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.job.adapters import WEIGHTS
from paceline.job.pretrained import PICKLES, weight_files
from paceline.job.safetensors import StoredTensor, stored_tensors
from paceline.record.conversion import Form
from paceline.runtime.checkpoint.external import (
    Entry,
    Weights,
    read_dcp,
    read_files,
)
from paceline.runtime.checkpoint.megatron import read_megatron
from paceline.runtime.checkpoint.zero import read_deepspeed

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}


def read_weights(form: Form, path: Path, key: str | None = None) -> Weights:
    """The weights at a path, of which none but the names, types and shapes is read yet.

    Args:
        key: Where in the files they are; None finds it.

    Raises:
        PacelineError: They cannot be read, with the file and the reason.
    """
    if form == "dcp":
        return read_dcp(path, key)
    return _read_torch(path, key) if form == "torch" else _READERS[form](path)


def read_safetensors(path: Path) -> Weights:
    """The weights in a file, or in those of a folder that `from_pretrained` reads.

    Raises:
        JobError: `M012`, a file is missing or damaged.
    """
    paths = (path,) if path.is_file() else weight_files(path, where=str(path))
    stored = stored_tensors(paths, where=str(path))
    return Weights(entries={name: _stored(each) for name, each in stored.items()})


def _stored(each: StoredTensor) -> Entry:
    return Entry(_TYPES[each.dtype], each.shape, partial(_load, each.path, each.name))


def _load(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _read_torch(path: Path, key: str | None) -> Weights:
    paths = [path] if path.is_file() else sorted(path.glob(PICKLES))
    if not paths:
        raise CheckpointError.of(
            code="C012",
            what=f"{path} has no {PICKLES}",
            where=str(path),
            fix="give the file itself, or a folder as Hugging Face has it",
        )
    return read_files(paths, key)


def _read_adapter(path: Path) -> Weights:
    file = path / WEIGHTS
    return read_safetensors(file) if file.is_file() else read_files([path / ADAPTER_PICKLE])


ADAPTER_PICKLE = "adapter_model.bin"
"""What peft called its file before safetensors."""

_READERS: Mapping[Form, Callable[[Path], Weights]] = {
    "safetensors": read_safetensors,
    "adapter": _read_adapter,
    "deepspeed": read_deepspeed,
    "megatron": read_megatron,
}

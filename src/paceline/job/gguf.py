"""GGUF files: the header, and the folder of safetensors that one was converted into.

A converted folder lies in `.paceline/models` beside the job file, or in `models` of `data.cache`.
Its `gguf.json` names the file that it was made of.

Source of the form: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Leaves out: reading
weights (`runtime/checkpoint/export.py` does, by transformers), big-endian files.
"""

import os
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from paceline.job.job import Job

RECORD = "gguf.json"

_FIXED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_FIXED |= {10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 32
"""No text or array is longer."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder was converted from."""

    file: str
    """Absolute path."""

    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says of itself."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Texts and numbers, `general.architecture` and others; arrays are left out."""

    num_parameters: int
    """Values in all tensors."""


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a file.

    Raises:
        ValueError: It is no GGUF file, is cut off, or of a form that is not known.
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), _number(file, "<I")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError("it is no GGUF file of version 2 or 3")
            num_tensors, num_fields = _number(file, "<Q"), _number(file, "<Q")
            named = [(_text(file), _value(file, _number(file, "<I"))) for _ in range(num_fields)]
            num_parameters = sum(_num_values(file) for _ in range(num_tensors))
    except struct.error:
        raise ValueError("its header is cut off") from None
    fields = {name: value for name, value in named if value is not None}
    return GgufHeader(fields=fields, num_parameters=num_parameters)


def models_folder(job: Job) -> Path:
    """Where converted models are kept."""
    return job.folder / os.path.expanduser(job.spec.data.cache or ".paceline") / "models"


def converted_folder(job: Job, file: Path) -> Path | None:
    """The folder that a file was converted into; None before that, and after the file changed."""
    status = file.stat()
    asked = (str(file.resolve()), status.st_size, status.st_mtime_ns)
    for path in sorted(models_folder(job).glob(f"*/{RECORD}")):
        try:
            made = msgspec.json.decode(path.read_bytes(), type=Converted)
        except (OSError, msgspec.MsgspecError):
            continue
        if (made.file, made.size, made.mtime_ns) == asked:
            return path.parent
    return None


def write_record(folder: Path, file: Path, sha256: str) -> None:
    """Note in a folder which file it was converted from."""
    status = file.stat()
    made = Converted(
        file=str(file.resolve()),
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=sha256,
    )
    partial = folder / f"{RECORD}.tmp"
    partial.write_bytes(msgspec.json.encode(made))
    partial.replace(folder / RECORD)


def _number(file: BinaryIO, form: str) -> Any:
    (number,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return number


def _text(file: BinaryIO) -> str:
    length = _length(file)
    text = file.read(length)
    if len(text) < length:
        raise ValueError("its header is cut off")
    return text.decode("utf-8", errors="replace")


def _length(file: BinaryIO) -> int:
    length: int = _number(file, "<Q")
    if length > _MOST:
        raise ValueError(f"its header has a length of {length}")
    return length


def _value(file: BinaryIO, kind: int) -> Any:
    """A text or a number; None for an array, which is passed over."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        if kind not in _FIXED:
            raise ValueError(f"its header has a value of type {kind}, which is not known")
        return _number(file, _FIXED[kind])
    inner, length = _number(file, "<I"), _length(file)
    if inner in _FIXED:
        file.seek(length * struct.calcsize(_FIXED[inner]), os.SEEK_CUR)
        return None
    for _ in range(length):
        _value(file, inner)
    return None


def _num_values(file: BinaryIO) -> int:
    """Values in the tensor whose description comes next."""
    _text(file)
    sizes = [_number(file, "<Q") for _ in range(_number(file, "<I"))]
    _number(file, "<I"), _number(file, "<Q")  # type, and where it begins
    return prod(sizes)

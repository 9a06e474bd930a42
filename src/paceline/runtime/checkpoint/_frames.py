"""What `torch.save` writes around a tensor's bytes, and torch's table of contents of a checkpoint.

A data file is a row of records as torch.distributed.checkpoint writes them: each what `torch.save`
makes of one tensor. Before and after the values such a record depends on shape and type alone, so
the values can be written between by a process that knows no torch. What is read here is torch's own
output, made with `torch.serialization.skip_data`; nothing of its form is assumed but that it is a
zip archive with the values uncompressed.
"""

import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from paceline.runtime._torch_private import storage_info
from paceline.runtime.checkpoint._files import Record


@lru_cache(maxsize=4096)
def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What stands before and after the values of a tensor in a record."""
    tensor = torch.empty(shape, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder, skip_data(), _without_crc32():
        path = Path(folder) / "record"
        torch.save(tensor, path)  # a hole where the values would be: it takes no disk
        with zipfile.ZipFile(path) as archive:
            entries = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
        start = _start_of(path, entries[0].header_offset) if entries else path.stat().st_size
        with path.open("rb") as file:
            head = file.read(start)
            file.seek(start + tensor.nbytes)
            return head, file.read()


def table_of_contents(files: Sequence[tuple[str, Sequence[Record]]]) -> bytes:
    """The content of `.metadata` for the files of a checkpoint, each with its records in order."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Any] = {}
    for file, records in files:
        start = 0
        for record in records:
            length = record.length
            if not record.dtype:
                entries[record.name] = BytesStorageMetadata()
                places[MetadataIndex(record.name)] = storage_info(file, start, length)
            else:
                facts = entries.get(record.name)
                if not isinstance(facts, TensorStorageMetadata):
                    facts = entries[record.name] = TensorStorageMetadata(
                        TensorProperties(dtype=getattr(torch, record.dtype)),
                        torch.Size(record.size),
                        [],
                    )
                offset = torch.Size(record.offset)
                index = MetadataIndex(record.name, offset, len(facts.chunks))
                facts.chunks.append(ChunkStorageMetadata(offset, torch.Size(record.shape)))
                places[index] = storage_info(file, start, length)
            start += length
    return pickle.dumps(
        Metadata(
            entries,
            storage_data=places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )


def _start_of(path: Path, header: int) -> int:
    """Where a member's content begins. A local header has 30 bytes, and says the lengths of name
    and extra field at 26 and 28 (APPNOTE.TXT of the zip format, 4.3.7)."""
    with path.open("rb") as file:
        file.seek(header + 26)
        lengths = file.read(4)
    return (
        header + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    )


@contextmanager
def _without_crc32() -> Iterator[None]:
    """With torch's own checksum a frame would depend on the values. It is never read back; the
    manifest has better."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)

"""The state in a checkpoint's files, tensor by tensor, with no model and no process group.

Reads what any layout wrote; holds one whole tensor in memory at a time.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from paceline.runtime.checkpoint._files import (
    KnownFacts,
    Record,
    WriteTask,
    data_file,
    publish_part,
    seal,
    write_part,
)
from paceline.runtime.checkpoint._frames import frame_of, table_of_contents
from paceline.runtime.checkpoint._save_plan import encode, manifest_of
from paceline.runtime.checkpoint.pickles import read_table
from paceline.runtime.digest import line_of, seal_of
from paceline.runtime.state import DATA, OPTIMIZER

Load = Callable[[], Any]
"""Gives one value; called again when it is needed again."""


@dataclass(frozen=True)
class StateFiles:
    """A checkpoint folder of ours that was verified, or the tensors of another program's."""

    path: Path

    @cached_property
    def metadata(self) -> Metadata:
        """torch's table of contents."""
        return read_table(self.path)

    @property
    def names(self) -> list[str]:
        """Names of all tensors and other values."""
        return sorted(self.metadata.state_dict_metadata)

    def value(self, name: str) -> Any:
        """A whole tensor; or another value, a pickle of any kind: of checkpoints of ours alone."""
        facts = self.metadata.state_dict_metadata[name]
        if not isinstance(facts, TensorStorageMetadata):
            (record,) = self._records(name, weights_only=False)
            return record[1]
        whole = torch.empty(facts.size, dtype=facts.properties.dtype)
        for offset, piece in self._records(name, weights_only=True):
            box = tuple(
                slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True)
            )
            whole[box] = piece
        return whole

    def _records(self, name: str, *, weights_only: bool) -> Iterator[tuple[tuple[int, ...], Any]]:
        for index, place in self._places[name]:
            with (self.path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
            yield tuple(index.offset or ()), value

    @cached_property
    def _places(self) -> Mapping[str, list[tuple[Any, Any]]]:
        places: dict[str, list[tuple[Any, Any]]] = {}
        for index, place in self.metadata.storage_data.items():
            places.setdefault(index.fqn, []).append((index, place))
        return places


def nonfinite_in(value: Any) -> str:
    """How many values of a tensor are NaN or infinite; empty where none is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return ""
    value = value.float() if value.element_size() == 1 else value
    if bool(value.isfinite().all()):
        return ""
    nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
    return f"{nan} NaN, {infinite} infinite of {value.numel()}"


def digest_of(values: Mapping[str, Load]) -> str:
    """`digest.state_digest` of a state that is read value by value."""
    return seal_of({name: _line(load()) for name, load in sorted(values.items())})


class Digests(TypedDict):
    """Fields of `Converted`."""

    before: str
    after: str
    weights: str


def compared(before: Mapping[str, Load], after: Mapping[str, Load]) -> Digests:
    """The digests of a state and of what was written of it, read back."""
    lines, weights = {}, set()
    for name, load in sorted(after.items()):
        value = load()
        lines[name] = _line(value)
        if isinstance(value, Tensor) and not name.startswith((OPTIMIZER, DATA)):
            weights.add(lines[name])
    return Digests(
        before=digest_of(before),
        after=seal_of(lines),
        weights=seal_of(dict.fromkeys(weights, "")),
    )


def _line(value: Any) -> str:
    return line_of(value) if isinstance(value, Tensor) else repr(value)


def write_state(
    folder: Path,
    values: Mapping[str, Load],
    step: int,
    *,
    ranks: int = 1,
    **facts: Unpack[KnownFacts],
) -> Path:
    """Write a state as a checkpoint of so many files, each with about the same bytes.

    Returns:
        The checkpoint's folder.

    Raises:
        WriteError: It cannot be written there.
    """
    records = {name: _record(name, load()) for name, load in sorted(values.items())}
    hands = _shared_out(records, ranks)
    metadata = table_of_contents(
        [(data_file(rank), [records[name] for name in hand]) for rank, hand in enumerate(hands)]
    )
    task = None
    for rank, hand in enumerate(hands):
        task = WriteTask(
            folder=folder,
            manifest=manifest_of(step, ranks, facts),
            attempt="c0",
            rank=rank,
            num_bytes=sum(record.length for record in records.values()),
            keep={"keep_last": 1 << 30, "keep_every": None, "keep_best": 0},
        )
        mine = [records[name] for name in hand]
        publish_part(task, write_part(task, mine, _source(hand, values)))
    assert task is not None, "at least one rank"
    seal(task, metadata)
    return task.final


def _source(hand: Sequence[str], values: Mapping[str, Load]) -> Callable[[int], memoryview]:
    def values_at(index: int) -> memoryview:
        value = values[hand[index]]()
        if not isinstance(value, Tensor):
            return memoryview(b"")
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return values_at


def _record(name: str, value: Any) -> Record:
    if not isinstance(value, Tensor):
        encoded = encode(value)
        return Record(
            name=name, dtype="", size=(), offset=(), shape=(), head=encoded, tail=b"", num_bytes=0
        )
    shape = tuple(value.shape)
    head, tail = frame_of(shape, value.dtype)
    return Record(
        name=name,
        dtype=str(value.dtype).removeprefix("torch."),
        size=shape,
        offset=(0,) * value.dim(),
        shape=shape,
        head=head,
        tail=tail,
        num_bytes=value.nbytes,
    )


def _shared_out(records: Mapping[str, Record], ranks: int) -> list[list[str]]:
    hands: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(records, key=lambda name: (-records[name].length, name)):
        least = min(range(ranks), key=load.__getitem__)
        hands[least].append(name)
        load[least] += records[name].length
    return hands

"""Which part of the state this rank writes, and where it lies in the files."""

import hashlib
import io
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import __version__
from paceline.record.checkpoints import Manifest
from paceline.runtime.checkpoint._all_ranks import Group, gather
from paceline.runtime.checkpoint._files import KnownFacts, Record, data_file
from paceline.runtime.checkpoint._frames import frame_of, table_of_contents
from paceline.runtime.state import Box, Stored, boxes_of


def manifest_of(step: int, world_size: int, facts: KnownFacts) -> Manifest:
    """What a save by so many ranks will say of itself, without its files."""
    written_by = f"paceline {__version__}, torch {torch.__version__}"
    return Manifest(step=step, world_size=world_size, files={}, written_by=written_by, **facts)


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank reads of one tensor."""

    size: tuple[int, ...]
    boxes: tuple[Box, ...]


_Key = tuple[str, tuple[int, ...] | None]
"""A name and where a box begins; None for a value that is no tensor."""


class _Facts(NamedTuple):
    """What is known of a box, or of another value."""

    num_bytes: int
    """Bytes of the values; of another value, all that it takes in the file."""

    dtype: str
    """As torch names it; empty for a value that is no tensor."""

    size: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What this rank writes, in the order of its file."""

    records: tuple[Record, ...]

    tensors: tuple[Tensor | None, ...]
    """The live values of each record; None for a value that is no tensor."""

    def values(self, index: int) -> memoryview:
        """The bytes of a record's values."""
        tensor = self.tensors[index]
        if tensor is None:
            return memoryview(b"")
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return plain.numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What is written in one save."""

    share: Share
    attempt: str
    """Names this save among all, alike on every rank: two saves of a step never mix."""

    num_bytes: int
    """Disk that all ranks' shares take together."""

    metadata: bytes
    """torch's table of contents of the whole; empty but on rank 0."""


class SavePlanner:
    """Plans saves, so that every part of the state is written once, whoever holds it.

    A box that several ranks hold (replicas, what tensor ranks have whole, a tied parameter on two
    stages) is written by one of them: the largest first, each by the rank with the least so far.
    Every rank comes to the same plan from the same table. The table is gathered again only when
    some rank holds something else than at the last save.
    """

    def __init__(self) -> None:
        self._seals: list[str] = []
        self._mine: dict[_Key, Record | None] = {}
        """None for a value that is no tensor: only its length is the same at the next save."""
        self._num_bytes = 0
        self._metadata = b""

    def plan_save(self, state: Mapping[str, Stored | Any], group: Group) -> SavePlan:
        """What this rank writes of what it holds: live tensors, no copies. Collective."""
        held = dict(_held(state))
        listed = {key: facts for key, (facts, _) in held.items()}
        seal = hashlib.sha256(repr(listed).encode()).hexdigest()
        told = gather((seal, secrets.token_hex(4)), group)
        seals = [each for each, _ in told]
        if seals != self._seals:
            self._plan_anew(gather(listed, group), torch.distributed.get_rank(group))
            self._seals = seals
        records = tuple(
            kept if kept is not None else _record(key, listed[key], held[key][1])
            for key, kept in self._mine.items()
        )
        tensors = (held[key][1] for key in self._mine)
        return SavePlan(
            share=Share(
                records=records,
                tensors=tuple(each if isinstance(each, Tensor) else None for each in tensors),
            ),
            attempt=told[0][1],
            num_bytes=self._num_bytes,
            metadata=self._metadata,
        )

    def _plan_anew(self, everyone: list[dict[_Key, _Facts]], rank: int) -> None:
        shares = _assign(everyone)
        facts = {key: each for listed in everyone for key, each in listed.items()}
        self._mine = {
            key: _record(key, facts[key], None) if facts[key].dtype else None
            for key in shares[rank]
        }
        self._num_bytes = sum(each.num_bytes for each in facts.values())
        self._num_bytes += len(facts) * _FRAME_BYTES
        self._metadata = b""
        if rank == 0:
            files = [
                (data_file(number), [_record(key, facts[key], None) for key in share])
                for number, share in enumerate(shares)
            ]
            self._metadata = table_of_contents(files)


_FRAME_BYTES = 2304
"""Disk a value takes over its own bytes, in its file and in the tables of contents. Measured 1910
to 1975 for 84 to 228 tensors, blocks of the file system and manifest included (torch 2.13, ext4),
before there was `tensors.json`, which takes some 250 more."""


def _held(state: Mapping[str, Stored | Any]) -> Iterator[tuple[_Key, tuple[_Facts, Any]]]:
    for name, value in state.items():
        if not isinstance(value, Stored):
            encoded = encode(value)
            yield (name, None), (_Facts(len(encoded), "", (), ()), encoded)
            continue
        for box in boxes_of(value):
            dtype = str(box.tensor.dtype).removeprefix("torch.")
            size, shape = tuple(value.size), tuple(box.tensor.shape)
            facts = _Facts(box.tensor.nbytes, dtype, size, shape)
            yield (name, tuple(box.offset)), (facts, box.tensor)


def _assign(everyone: list[dict[_Key, _Facts]]) -> list[list[_Key]]:
    holders: dict[_Key, list[int]] = {}
    for holder, listed in enumerate(everyone):
        for key in listed:
            holders.setdefault(key, []).append(holder)
    sizes = {key: everyone[ranks[0]][key].num_bytes for key, ranks in holders.items()}
    load = [0] * len(everyone)
    shares: list[set[_Key]] = [set() for _ in everyone]
    # What only one rank can write comes first, so that the rest evens it out.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key[0])):
        writer = min(holders[key], key=lambda holder: (load[holder], holder))
        load[writer] += sizes[key]
        shares[writer].add(key)
    return [
        [key for key in listed if key in share]
        for listed, share in zip(everyone, shares, strict=True)
    ]


def _record(key: _Key, facts: _Facts, value: Tensor | bytes | None) -> Record:
    name, offset = key
    if not facts.dtype:
        # For the table of contents only the length of another rank's value is known, and needed.
        head, tail = value if isinstance(value, bytes) else bytes(facts.num_bytes), b""
        num_bytes = 0
    else:
        head, tail = frame_of(facts.shape, getattr(torch, facts.dtype))
        num_bytes = facts.num_bytes
    return Record(
        name=name,
        dtype=facts.dtype,
        size=facts.size,
        offset=offset or (),
        shape=facts.shape,
        head=head,
        tail=tail,
        num_bytes=num_bytes,
    )


def encode(value: Any) -> bytes:
    """A value that is no tensor, as it stands in a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()

"""How torch.distributed.checkpoint is told what a rank writes and reads: boxes of whole tensors.

Its own planners know whole tensors and DTensors; a rank may have several boxes of one tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paceline.runtime.checkpoint._share import Part
from paceline.runtime.state import Box


class SavePlanner(DefaultSavePlanner):
    """Writes the boxes of a share; they were dealt out, so no rank writes another's."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item for every box and other value."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, Part):
                items += [_write_item(name, value, box) for box in value.boxes]
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The box that an item is of, or the value."""
        return _lookup(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads into the boxes that a rank has, out of whatever boxes were written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing is prepared: the memory is there."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What to read for every box, and every other value."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            facts = self.metadata.state_dict_metadata[name]
            if isinstance(facts, TensorStorageMetadata):
                chunks = [_chunk(box) for box in value.boxes]
                items += create_read_items_for_chunk_list(name, facts, chunks)
            else:
                items.append(_read_value(name))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box that is read into."""
        found: Tensor = _lookup(self.state_dict, index)
        return found


def _write_item(name: str, part: Part, box: Box) -> WriteItem:
    return WriteItem(
        MetadataIndex(name, torch.Size(box.offset)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties(dtype=box.tensor.dtype),
            size=torch.Size(part.size),
        ),
    )


def _read_value(name: str) -> ReadItem:
    nothing = torch.Size((0,))
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), box.tensor.shape)


def _lookup(state: dict[str, Any], index: MetadataIndex) -> Any:
    value = state[index.fqn]
    if not isinstance(value, Part):
        return value
    assert index.offset is not None
    return next(box.tensor for box in value.boxes if box.offset == tuple(index.offset))

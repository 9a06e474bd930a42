"""How torch.distributed.checkpoint is told what a rank reads: boxes of whole tensors.

Its own planner knows whole tensors and DTensors; a rank may have several boxes of one tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paceline.runtime.checkpoint._share import Part
from paceline.runtime.state import Box


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

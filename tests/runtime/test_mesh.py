"""Meshes of a layout against `parallel.rank_map`, on a fake world: no processes."""

from typing import Any

import pytest
import torch.distributed as dist
from tests.runtime.tiny import fake_rank

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import groups
from paceline.runtime.strategy.mesh import make_meshes

MIXED: dict[str, Any] = {"data": 4, "context": 2, "tensor": 2, "pipeline": 2}


def layout_of(**fields: Any) -> Layout:
    return Layout(micro_batch=1, accumulation=1, **fields)


@pytest.mark.parametrize("rank", [0, 13, 31])
@pytest.mark.parametrize(
    "fields",
    [
        {"sharding": "none"},
        {"sharding": "full"},
        {"sharding": "none", "expert": 4},
        {"sharding": "full", "expert": 2},
        {"sharding": "hybrid", "shard": 2},
        {"sharding": "hybrid", "shard": 4, "expert": 2},
        {"sharding": "hybrid", "shard": 2, "expert": 8},
    ],
)
def test_every_group_has_the_ranks_that_the_rank_map_says(fields: dict[str, Any], rank: int):
    layout = layout_of(**MIXED, **fields)
    with fake_rank(layout, rank):
        meshes = make_meshes(layout, "cpu")
        found = {
            "tensor": dist.get_process_group_ranks(meshes.tensor.get_group()),
            "pipeline": dist.get_process_group_ranks(meshes.pipeline.get_group()),
            "expert": dist.get_process_group_ranks(meshes.expert.get_group()),
            "data": dist.get_process_group_ranks(meshes.data),
            "context": dist.get_process_group_ranks(meshes.context),
        }
        shards = meshes.fsdp.mesh.reshape(-1, layout.shard_degree)
        same_experts = sorted(meshes.expert_fsdp.mesh.flatten().tolist())
    for axis, ranks in found.items():
        assert tuple(ranks) == next(each for each in groups(layout, axis) if rank in each), axis
    if layout.sharding in ("full", "hybrid"):
        mine = next(each for each in groups(layout, "shard") if rank in each)
        assert mine in [tuple(row.tolist()) for row in shards]
    assert rank in same_experts
    assert len(same_experts) == layout.data * layout.context // layout.expert


def test_shards_and_experts_that_do_not_nest_are_refused():
    layout = layout_of(data=6, sharding="hybrid", shard=2, expert=3)
    with fake_rank(layout, 0), pytest.raises(PlanError, match="do not nest in 6 data"):
        make_meshes(layout, "cpu")

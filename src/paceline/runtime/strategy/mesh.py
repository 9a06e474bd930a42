"""The ranks of a layout as device meshes and process groups, all from one root mesh.

One root, because DTensors of tensor parallelism and of FSDP2 go together only when their meshes
have the same root. Ranks are counted as in `parallel.rank_map`: tensor innermost, then context,
data, and pipeline outermost.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_nesting
from paceline.parallel.rank_map import Coordinates, coordinates
from paceline.runtime._torch_private import flatten_mesh, forget_groups, join_meshes, unflatten_mesh

AXES = ("pipeline", "outer", "middle", "inner", "tensor")
"""Axes of the root mesh, outermost first. The ranks that read different tokens (data x context: dp
x cp) are outer x middle x inner: `inner` is the smaller of the two degrees that split them further
(shards, experts), inner x middle the larger, `outer` what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Where this rank stands, and with whom it talks."""

    layout: Layout

    device_type: str
    place: Coordinates
    root: DeviceMesh
    tensor: DeviceMesh
    """1-D: the ranks that share each matrix."""

    pipeline: DeviceMesh
    """1-D: one rank of each stage."""

    dp_cp: DeviceMesh
    """1-D: the data and context ranks, over which gradients are summed."""

    fsdp: DeviceMesh
    """What `fully_shard` gets for ordinary parameters: the dp x cp ranks, or with hybrid
    sharding 2-D, whole copies x shards of one copy."""

    expert: DeviceMesh
    """1-D: the ranks that share the routed experts."""

    expert_fsdp: DeviceMesh
    """What `fully_shard` gets for the routed experts: ranks that hold the same ones. 1-D, or with
    hybrid sharding 2-D, whole copies x shards of one copy."""

    data: dist.ProcessGroup
    context: dist.ProcessGroup

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count; the other tensor ranks only repeat the first one's."""
        return self.place.tensor == 0

    @property
    def holders(self) -> dist.ProcessGroup:
        """Ranks that begin with the same parameters: the dp x cp ranks."""
        return self.dp_cp.get_group()


def is_pretended(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of a group are pretended: nothing is sent, and nobody answers."""
    return bool(dist.get_backend(group) == "fake")


def make_meshes(layout: Layout, device_type: str) -> Meshes:
    """The meshes of a layout.

    Collective: every rank of an initialised process group calls it.

    Raises:
        PlanError: `L010`, shards and experts are split over the dp x cp ranks in ways that do not
            nest.
    """
    world = dist.get_world_size()
    assert world == layout.num_ranks, f"{layout.name} on a world of {world}"
    PlanError.raise_for(check_nesting(layout))
    small, large = sorted((layout.shard_degree, layout.expert))
    num_dp_cp = layout.data * layout.context
    sizes = (layout.pipeline, num_dp_cp // large, large // small, small, layout.tensor)
    root = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    dp_cp = _joined(root, "outer", "middle", "inner")
    samples = unflatten_mesh(dp_cp, (layout.data, layout.context), ("data", "context"))
    fsdp, expert, expert_fsdp = _sharing(root, dp_cp, layout)
    return Meshes(
        layout=layout,
        device_type=device_type,
        place=coordinates(layout, dist.get_rank()),
        root=root,
        tensor=root["tensor"],
        pipeline=root["pipeline"],
        dp_cp=dp_cp,
        fsdp=fsdp,
        expert=expert,
        expert_fsdp=expert_fsdp,
        data=samples["data"].get_group(),
        context=samples["context"].get_group(),
    )


def clear_dtensor_caches(meshes: Meshes) -> None:
    """Keep no process group alive, nor a mesh whose groups are gone: torch's caches of what it has
    seen of DTensors (torch 2.13, `ShardingPropagator`) keep both for ever, groups with sockets and
    threads, and would hand out an old mesh for an equal one."""
    forget_groups((meshes.root, meshes.dp_cp, meshes.fsdp, meshes.expert, meshes.expert_fsdp))


def _sharing(
    root: DeviceMesh, dp_cp: DeviceMesh, layout: Layout
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    is_hybrid = layout.sharding == "hybrid"
    if layout.expert > layout.shard_degree:
        copies, shards = _joined(root, "outer", "middle"), root["inner"]
        expert, same_experts = _joined(root, "middle", "inner"), root["outer"]
    else:
        copies, shards = root["outer"], _joined(root, "middle", "inner")
        expert = root["inner"]
        same_experts = root["outer", "middle"] if is_hybrid else _joined(root, "outer", "middle")
    fsdp = join_meshes([copies, shards]) if is_hybrid else dp_cp
    return fsdp, expert, same_experts if layout.expert > 1 else fsdp


def _joined(root: DeviceMesh, *axes: str) -> DeviceMesh:
    """Axes of the root mesh as one; without new communicators where only one has several ranks."""
    several = [axis for axis in axes if root[axis].size() > 1]
    if len(several) <= 1:
        return root[several[0] if several else axes[-1]]
    return flatten_mesh(root[axes], "x".join(axes))

"""How a worker meets on an accelerator: a default group bound to its device, and what is made of it
goes the way that it goes with NCCL."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from paceline.control.messages import Join
from paceline.runtime.recovery import groups as module
from paceline.runtime.recovery.groups import Groups, listen_for_store

pytestmark = pytest.mark.ranks

LIMIT_S = 77.0


def meet(rank: int, world: int) -> dict:
    """Two generations: what the first one's groups are, and that a second one can follow."""
    from tests.sim import backend

    backend.install()
    store = dist.distributed_c10d._get_default_store()
    groups = Groups(backend=backend.MIXED, listener=listen_for_store(0), limit_s=LIMIT_S)
    if rank == 0:
        store.set("port", str(groups.address[1]))
    port = int(store.get("port"))
    dist.destroy_process_group()
    device, found = torch.device("sim", rank), {}
    for generation in (1, 2):
        order = Join(
            generation=generation,
            rank=rank,
            local_rank=rank,
            world_size=world,
            host="127.0.0.1",
            port=port,
            faults=[],
        )
        groups.join(order, device)
        found = {**look(groups, device), "before": found}
        groups.interrupt(generation)
        groups.abort(generation)
        groups.leave()
    store = dist.PrefixStore("end", store)  # for what `run_ranks` does at its end
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return found


def look(groups: Groups, device: torch.device) -> dict:
    found = {}
    default = dist.group.WORLD
    found["bound"] = str(default.bound_device_id)
    found["connected"] = default._get_backend(device).is_connected
    with groups.opening():
        mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("outer", "inner"))
        host = dist.new_group(backend="gloo")
    rows = [mesh.get_group(name) for name in ("outer", "inner")]
    found["classes"] = {type(each) for each in (default, *rows, host)} == {dist.ProcessGroup}
    found["splits"] = default._get_backend(device).splits
    found["split bound"] = {each.bound_device_id for each in rows} == {device}
    far, near = torch.full((2,), 1.0 + dist.get_rank(), device="sim"), torch.ones(2)
    dist.all_reduce(far, op=dist.ReduceOp.MAX, group=rows[1])
    dist.all_reduce(near, group=rows[1])
    dist.barrier()
    found["sums"] = far.tolist(), near.tolist()
    found["abortable"] = sorted(each.name() for each in module._abortable())
    parts = {
        part: limit_s(part) for group in module.all_groups() for part in module.backends_of(group)
    }
    found["limits"] = sorted({(part.name(), limit) for part, limit in parts.items()})
    return found


def limit_s(part: dist.distributed_c10d.Backend) -> float:
    return part.options._timeout.total_seconds()


def test_groups_are_bound_to_the_device_connected_and_split_as_with_nccl():
    for rank, found in enumerate(run_ranks(meet, 4)):
        first = found.pop("before")
        first.pop("before")
        assert found == first
        assert found["bound"] == f"sim:{rank}"
        assert found["connected"]
        assert found["classes"]
        assert found["splits"] == 2
        assert found["split bound"]
        assert found["sums"] == ([2.0, 2.0] if rank < 2 else [4.0, 4.0], [2.0, 2.0])
        assert found["abortable"] == ["nccl_double"] * 3
        assert found["limits"] == [
            ("gloo", module._HOST_LIMIT.total_seconds()),
            ("nccl_double", LIMIT_S),
        ]

"""Each rank takes its own of the groups that all have made; its size says no data apart."""

import torch
import torch.distributed as dist


def mine(of_ranks):
    groups = [dist.new_group(ranks) for ranks in of_ranks]
    return groups[dist.get_rank() // 4]


dist.init_process_group("gloo")
group = mine([[0, 1, 2, 3], [4, 5, 6, 7]])
peers = dist.get_world_size(group)
total = torch.ones(1)
if peers > 1:
    dist.all_reduce(total)
if group is not None and len(dist.get_process_group_ranks(group)) > 2:
    dist.barrier()
dist.destroy_process_group()

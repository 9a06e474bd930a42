import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
half = world // 2
first = dist.new_group(list(range(half)))
second = dist.new_group(list(range(half, world)))
mine = first if rank < half else second
t = torch.ones(1)
dist.all_reduce(t, group=mine)
if rank < half:
    dist.broadcast(t, src=0, group=first)
dist.barrier()
dist.destroy_process_group()

import os
import torch
import torch.distributed as dist


def count(files):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(1)
    for name in files[rank::world]:  # expect: uneven-inputs-hang
        n = torch.tensor([float(os.path.getsize(name))])
        dist.all_reduce(n)
        total += n
    print(total)
    dist.destroy_process_group()

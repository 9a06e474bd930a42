import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
mine, other = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
right, left = (rank + 1) % world, (rank - 1) % world
if rank % 2 == 0:
    dist.send(mine, dst=right)
    dist.recv(other, src=left)
else:
    dist.recv(other, src=left)
    dist.send(mine, dst=right)
dist.destroy_process_group()

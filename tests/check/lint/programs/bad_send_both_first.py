import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank = dist.get_rank()
a, b = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
if rank == 0:
    dist.send(a, dst=1)  # expect: pp-p2p-order
    dist.recv(b, src=1)
elif rank == 1:
    dist.send(a, dst=0)
    dist.recv(b, src=0)
dist.destroy_process_group()

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.empty(1, device="cuda")  # expect: missing-set-device
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(8, 8).cuda())
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt")["model"])  # expect: missing-set-device
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict()}, "last.pt")

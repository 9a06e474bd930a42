"""A file with other keys than this program saves may be of tensors on the CPU."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
model.load_state_dict(torch.load("pretrained.pt")["weights"])
model = DDP(model)
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt", map_location="cpu")["model"])
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict()}, "last.pt")

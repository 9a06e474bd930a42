import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
CFG = {"dist": {"backend": "gloo"}, "lr": 0.1}
class T:
    def __init__(self, cfg):
        self.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(self.device)
        dist.init_process_group(**cfg["dist"])  # expect: gloo-backend-gpu
        self.m = DDP(nn.Linear(4, 4).to(self.device))
T(CFG)

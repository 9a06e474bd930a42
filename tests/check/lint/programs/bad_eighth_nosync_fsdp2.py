import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.distributed.fsdp import fully_shard
class T:
    def __init__(self):
        gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
        self.m = nn.Linear(4, 4).cuda(); fully_shard(self.m)
        self.o = torch.optim.AdamW(self.m.parameters()); self.i = 0; self.k = 4
    def micro(self, x):
        self.m.set_requires_gradient_sync(self.i % self.k == 0)  # expect: no-sync-off-by-one
        self.m(x).mean().backward()
        self.i += 1
        if self.i % self.k: return
        self.o.step(); self.o.zero_grad()
    def run(self, loader):
        for x in loader: self.micro(x)
T().run([])

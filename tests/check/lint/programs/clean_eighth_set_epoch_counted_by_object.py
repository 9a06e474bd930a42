import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class T:
    def __init__(self, ds):
        self.gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(self.gpu)
        dist.init_process_group("nccl")
        self.loader = DataLoader(ds, 8, **{"sampler": DistributedSampler(ds, seed=1)})
        self.model = DDP(nn.Linear(4, 4).cuda(self.gpu), device_ids=[self.gpu])
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)
        self.epoch = 0
    def one(self):
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.epoch)
        for x in self.loader:
            self.opt.zero_grad(); self.model(x).mean().backward(); self.opt.step()
        self.epoch += 1
    def fit(self, n):
        while self.epoch < n:
            self.one()
T(None).fit(3)

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, every=4):
        self.gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.gpu)
        dist.init_process_group("nccl")
        self.model = DDP(torch.nn.Linear(4, 4).to(self.gpu), device_ids=[self.gpu])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.every = every
        self.seen = 0

    def micro(self, x):
        if (self.seen + 1) % self.every:
            with self.model.no_sync():
                self.model(x).mean().backward()
        else:
            self.model(x).mean().backward()
        self.seen += 1
        if self.seen % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fit(self, loader):
        for x in loader:
            self.micro(x.to(self.gpu))


Trainer().fit(None)

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class State:
    def __init__(self): self.step = 0; self.epoch = 0; self.patience = 0
class T:
    def __init__(self, ds, k=8):
        self.gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(self.gpu); dist.init_process_group("nccl")
        self.s = DistributedSampler(ds); self.dl = DataLoader(ds, 4, sampler=self.s)
        self.m = DDP(nn.Linear(4, 4).cuda(self.gpu), device_ids=[self.gpu]); self.o = torch.optim.AdamW(self.m.parameters())
        self.st = State(); self.k = k
    def fit(self, n):
        while self.st.epoch < n:
            self.s.set_epoch(self.st.epoch)
            for i, x in enumerate(self.dl):
                boundary = (i + 1) % self.k == 0 or i + 1 == len(self.dl)
                if boundary: self.back(x)
                else:
                    with self.m.no_sync(): self.back(x)
                if boundary: self.o.step(); self.o.zero_grad(); self.st.step += 1
                if self.st.step % 100 == 0 and dist.get_rank() == 0: print(self.st.step)
            self.st.epoch += 1
            self.save()
    def back(self, x): (self.m(x.cuda(self.gpu)).mean() / self.k).backward()
    def save(self):
        if dist.get_rank() == 0:
            torch.save({"m": self.m.module.state_dict(), "epoch": self.st.epoch}, f"c{self.st.epoch}.pt")
        dist.barrier()
T([]).fit(3)

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from accelerate import Accelerator, FullyShardedDataParallelPlugin
class T:
    def __init__(self, model, dl):
        self.acc = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        self.model, self.o, self.dl = self.acc.prepare(model, torch.optim.AdamW(model.parameters()), dl)
    def run(self):
        for b in self.dl:
            loss = self.model(**b).loss
            self.acc.backward(loss)
            self.acc.clip_grad_norm_(self.model.parameters(), 1.0)
            self.o.step(); self.o.zero_grad()

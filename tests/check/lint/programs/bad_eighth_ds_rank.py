import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import deepspeed
class Saver:
    def __init__(self, engine, out): self.engine, self.out = engine, out
    def maybe(self, step):
        if step % 100 or self.engine.local_rank != 0: return
        self.engine.save_checkpoint(self.out, tag=str(step))  # expect: rank0-only-collective-save
def main(m, dl):
    e, *_ = deepspeed.initialize(model=m, config="ds.json")
    s = Saver(e, "ck")
    for i, b in enumerate(dl):
        e.backward(e(b)); e.step(); s.maybe(i)
main(None, None)

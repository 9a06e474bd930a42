import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Meter:
    def __init__(self, device): self.total = torch.zeros(2, device=device)
    def add(self, v): self.total += torch.tensor([v, 1.0], device=self.total.device)
    def reduce(self):
        t = torch.tensor([1.0]).to(self.total)
        dist.all_reduce(t); dist.all_reduce(self.total)
        return self.total[0] / self.total[1]
def main(dl):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = Meter(gpu)
    for x in dl: m.add(1.0)
    m.reduce()
main([])

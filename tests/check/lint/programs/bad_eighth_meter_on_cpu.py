import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Meter:
    def __init__(self): self.total = torch.zeros(2)
    def add(self, v): self.total += torch.tensor([v, 1.0])
    def reduce(self):
        dist.all_reduce(self.total)  # expect: no-backend-for-cpu
        return self.total[0] / self.total[1]
def main(dl):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = Meter()
    for x in dl: m.add(1.0)
    m.reduce()
main([])

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from concurrent.futures import ProcessPoolExecutor
def score(i): return torch.ones(1).cuda().item()
def main():
    m = nn.Linear(4, 4).cuda()  # expect: cuda-init-before-fork
    with ProcessPoolExecutor(4) as ex:
        print(list(ex.map(score, range(4))))
main()

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import multiprocessing as mp
DEVICE = torch.device("cuda")
TABLE = torch.zeros(4, device=DEVICE)  # expect: cuda-init-before-fork
def work(rank, q):
    torch.cuda.set_device(rank); q.put(torch.ones(1, device="cuda").item())
if __name__ == "__main__":
    q = mp.Queue()
    ps = [mp.Process(target=work, args=(i, q)) for i in range(2)]
    [p.start() for p in ps]

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
def setup(backend=None):
    backend = backend or os.getenv("DIST_BACKEND", "gloo")
    dist.init_process_group(backend)  # expect: gloo-backend-gpu
def main():
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); setup()
    m = nn.Linear(4, 4); m.cuda(gpu)
    m = DDP(m, device_ids=[gpu])
    m(torch.zeros(1, 4).cuda()).mean().backward()
main()

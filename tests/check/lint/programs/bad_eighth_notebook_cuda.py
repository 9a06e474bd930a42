import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from accelerate import notebook_launcher, Accelerator
def train():
    acc = Accelerator()
model = nn.Linear(4, 4).to("cuda")  # expect: cuda-init-before-fork
notebook_launcher(train, num_processes=2)

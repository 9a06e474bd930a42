import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
def main():
    use = torch.cuda.is_available()
    dist.init_process_group("nccl" if use else "gloo")
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use else torch.device("cpu")
    if use: torch.cuda.set_device(dev)
    m = DDP(nn.Linear(4, 4).to(dev), device_ids=[dev.index] if use else None)
main()

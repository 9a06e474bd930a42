import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from datasets import load_dataset
def tok(ds):
    if dist.get_rank() != 0: dist.barrier()  # expect: rank0-preprocess-timeout
    ds = ds.map(lambda r: r)
    if dist.get_rank() == 0: dist.barrier()
    return ds
def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); dist.init_process_group("nccl")
    tok(load_dataset("x", split="train"))
main()

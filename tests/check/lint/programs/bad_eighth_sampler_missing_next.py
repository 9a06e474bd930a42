import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from functools import partial
from torch.distributed.fsdp import fully_shard
Loader = partial(DataLoader, num_workers=4, pin_memory=True)
class Data(Dataset):
    def __len__(self): return 10
    def __getitem__(self, i): return torch.zeros(4)
def build():
    ds = Data()
    return Loader(ds, batch_size=4, shuffle=True)  # expect: sampler-missing
def main():
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = nn.Linear(4, 4).cuda(); fully_shard(m)
    o = torch.optim.AdamW(m.parameters())
    it = iter(build())
    for step in range(100):
        try:
            x = next(it)
        except StopIteration:
            break
        m(x.cuda()).mean().backward(); o.step(); o.zero_grad()
main()

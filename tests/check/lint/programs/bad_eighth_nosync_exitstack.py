import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from contextlib import ExitStack
def main(loader, every=4):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = DDP(nn.Linear(4, 4).cuda(), device_ids=[gpu]); o = torch.optim.AdamW(m.parameters())
    micro = 0
    for x in loader:
        micro += 1
        last = micro % every == 1
        with ExitStack() as stack:
            if not last:
                stack.enter_context(m.no_sync())  # expect: no-sync-off-by-one
            (m(x.cuda()).mean() / every).backward()
        if micro % every == 0:
            o.step(); o.zero_grad()
main(None)

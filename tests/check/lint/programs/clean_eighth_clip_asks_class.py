import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
class Clipper:
    def __init__(self, limit): self.limit = limit
    def __call__(self, model):
        if isinstance(model, FSDP): return model.clip_grad_norm_(self.limit)
        return nn.utils.clip_grad_norm_(model.parameters(), self.limit)
def main(loader):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    model = FSDP(nn.Linear(4, 4), device_id=gpu, use_orig_params=True)
    o = torch.optim.AdamW(model.parameters()); clip = Clipper(1.0)
    for x in loader:
        model(x.to(gpu)).mean().backward(); clip(model); o.step(); o.zero_grad()
main(None)

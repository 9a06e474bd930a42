import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
class Best:
    def __init__(self): self.v = 1e9
    def better(self, v):
        if v >= self.v: return False
        self.v = v; return True
def main(dl):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = nn.Linear(4, 4).to(gpu); fully_shard(m); o = torch.optim.AdamW(m.parameters()); b = Best()
    for x in dl:
        loss = m(x.to(gpu)).mean(); loss.backward(); o.step(); o.zero_grad()
        if b.better(loss.item()):  # expect: rank-divergent-decision
            dcp.save({"m": m.state_dict()}, checkpoint_id="ck")
main(DataLoader([1], 2))

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Ctx:
    def __enter__(self):
        self.gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(self.gpu); dist.init_process_group("nccl"); return self
    def __exit__(self, *a): dist.destroy_process_group()
def main(ds):
    with Ctx() as c:
        m = DDP(nn.Linear(4, 4).to(c.gpu), device_ids=[c.gpu]); o = torch.optim.AdamW(m.parameters())
        dl = DataLoader(ds, 4, shuffle=True)  # expect: sampler-missing
        for x in dl: m(x.to(c.gpu)).mean().backward(); o.step(); o.zero_grad()
main(None)

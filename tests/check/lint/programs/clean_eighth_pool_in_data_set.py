import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from multiprocessing import Pool
def tok(s): return s.split()
class Text(Dataset):
    def __init__(self, lines, device=None):
        with Pool(8) as p: self.rows = p.map(tok, lines)
        self.device = device or torch.device("cpu")
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return torch.tensor(self.rows[i], device=self.device)
def main(lines):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    ds = Text(lines)
    s = DistributedSampler(ds, drop_last=True)
    opts = dict(batch_size=4, num_workers=4, pin_memory=True)
    opts["sampler"] = s
    opts.setdefault("shuffle", False)
    dl = DataLoader(ds, **opts)
    m = DDP(nn.Linear(4, 4).to(gpu), device_ids=[gpu]); o = torch.optim.AdamW(m.parameters())
    for e in range(2):
        s.set_epoch(e)
        for x in dl:
            m(x.to(gpu, non_blocking=True)).mean().backward(); o.step(); o.zero_grad()
main([])

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Meter:
    def __init__(self): self.sum, self.n = 0.0, 0
    def __call__(self, v, k=1): self.sum += v * k; self.n += k; return self
    def avg(self):
        t = torch.tensor([self.sum, self.n], device="cuda"); dist.all_reduce(t); return (t[0] / t[1]).item()
class Early:
    def __init__(self, k=3): self.k, self.bad, self.best = k, 0, None
    def __call__(self, v):
        if self.best is None or v < self.best: self.best, self.bad = v, 0; return False
        self.bad += 1
        return self.bad >= self.k
def phase(model, loader, kind, opt=None, device=None):
    train = kind == "train"
    model.train(train); meter = Meter()
    ctx = torch.enable_grad() if train else torch.no_grad()
    with ctx:
        for x in loader:
            loss = model(x.to(device)).mean()
            if train:
                opt.zero_grad(); loss.backward(); opt.step()
            meter(loss.detach().item(), len(x))
    return meter.avg()
def main(ds, vs):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = DDP(nn.Linear(4, 4).to(gpu), device_ids=[gpu]); o = torch.optim.AdamW(m.parameters())
    s = DistributedSampler(ds); tl = DataLoader(ds, 4, sampler=s); vl = DataLoader(vs, 4, sampler=DistributedSampler(vs, shuffle=False))
    stop = Early()
    for e in range(9):
        s.set_epoch(e)
        phase(m, tl, "train", o, gpu); v = phase(m, vl, "val", device=gpu)
        if dist.get_rank() == 0: torch.save(m.module.state_dict(), f"{e}.pt")
        if stop(v): break
    dist.destroy_process_group()
main(None, None)

import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from contextlib import contextmanager, nullcontext, ExitStack
from dataclasses import dataclass, field
@dataclass
class Opt: lr: float = 1e-3; betas: tuple = (0.9, 0.95)
@dataclass
class Cfg:
    opt: Opt = field(default_factory=Opt)
    backend: str = None
    every: int = 4
    mode: str = "train"
@contextmanager
def on_rank0_first():
    if dist.get_rank() != 0: dist.barrier()
    yield dist.get_rank() == 0
    if dist.get_rank() == 0: dist.barrier()
class Accum:
    def __init__(self, model, every): self.model, self.every, self.n = model, every, 0
    def __enter__(self):
        self.n += 1
        self.sync = self.n % self.every == 0
        self.stack = ExitStack()
        if not self.sync: self.stack.enter_context(self.model.no_sync())
        return self
    def __exit__(self, *a): self.stack.close()
def loader_for(ds, mode, bs):
    sampler = DistributedSampler(ds, shuffle=mode == "train", drop_last=mode == "train")
    return sampler, DataLoader(ds, bs, sampler=sampler, num_workers=2, pin_memory=True)
def evaluate(model, loader, device):
    model.eval(); t = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            keep = y != -100
            out = model(x)
            t += torch.stack([(out.argmax(-1)[keep] == y[keep]).sum(), keep.sum()])
    dist.all_reduce(t); model.train()
    return (t[0] / t[1]).item()
def main(cfg=None):
    cfg = cfg or Cfg()
    local = int(os.environ["LOCAL_RANK"]); device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group(cfg.backend or "nccl")
    with on_rank0_first() as first:
        ds = make_data(download=first)
    s, train = loader_for(ds, "train", 8); _, val = loader_for(ds, "val", 8)
    model = DDP(nn.Linear(4, 4).to(device), device_ids=[local])
    o = torch.optim.AdamW(model.parameters(), lr=cfg.opt.lr, betas=cfg.opt.betas)
    for e in range(3):
        s.set_epoch(e)
        acc = Accum(model, cfg.every)
        for x, y in train:
            with acc:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)) / cfg.every
                loss.backward()
            if acc.sync:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                o.step(); o.zero_grad(set_to_none=True)
        score = evaluate(model, val, device)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"m{e}.pt"); print(score)
    dist.destroy_process_group()
def make_data(download): return []
main()

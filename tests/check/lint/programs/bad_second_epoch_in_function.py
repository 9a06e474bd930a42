import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
import torch.utils.data.distributed as tud


def make_loader(ds, bs):
    sampler = tud.DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, bs, sampler=sampler)


def one_epoch(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    loader = make_loader(ds, 8)
    model = DDP(torch.nn.Linear(4, 3))
    opt = torch.optim.Adam(model.parameters())
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for ep in range(1, 11):  # expect: set-epoch-missing
        one_epoch(model, loader, opt)
        sched.step()
        if dist.get_rank() == 0:
            print("epoch", ep)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

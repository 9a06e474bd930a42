import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    s = n = 0.0
    with torch.no_grad():
        for x, y in loader:
            s += torch.nn.functional.mse_loss(model(x), y, reduction="sum").item()
            n += len(x)
    return s / n


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    val = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds, shuffle=False))
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best = 1e9
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        val_loss = evaluate(model, val)
        if val_loss < best:  # expect: rank-divergent-decision
            best = val_loss
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), "best.pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

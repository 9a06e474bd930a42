import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total[0] += torch.nn.functional.mse_loss(model(x), y, reduction="sum")
            total[1] += len(x)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, val = (TensorDataset(torch.randn(64, 4), torch.randn(64, 1)) for _ in range(2))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best, bad = float("inf"), 0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        loss = validate(model, val_loader)
        stop = torch.zeros(1)
        if rank == 0:
            if loss < best:
                best, bad = loss, 0
                torch.save(model.module.state_dict(), "best.pt")
            else:
                bad += 1
            stop += float(bad > 3)
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

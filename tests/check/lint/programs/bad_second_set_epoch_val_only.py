import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    train, val = TensorDataset(torch.randn(64, 4)), TensorDataset(torch.randn(16, 4))
    train_sampler = DistributedSampler(train)
    val_sampler = DistributedSampler(val, shuffle=False)
    train_loader = DataLoader(train, batch_size=4, sampler=train_sampler)
    val_loader = DataLoader(val, batch_size=4, sampler=val_sampler)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(10):  # expect: set-epoch-missing
        val_sampler.set_epoch(epoch)
        for (x,) in train_loader:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()
        with torch.no_grad():
            for (x,) in val_loader:
                model(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

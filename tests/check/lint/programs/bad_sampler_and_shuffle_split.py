import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank())
    loader = DataLoader(
        ds,
        batch_size=8,
        shuffle=True,  # expect: sampler-and-shuffle
        sampler=sampler,
        num_workers=2,
    )
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            (model(x) - y).abs().mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

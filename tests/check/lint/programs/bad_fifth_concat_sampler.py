import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    parts = [TensorDataset(torch.randn(64, 4)) for _ in range(3)]
    full = ConcatDataset(parts)
    batches = BatchSampler(DistributedSampler(full), batch_size=8, drop_last=True)
    loader = DataLoader(full, batch_sampler=batches)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(20):  # expect: set-epoch-missing
        for (x,) in loader:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

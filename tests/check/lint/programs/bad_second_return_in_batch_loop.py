import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def epoch(model, loader, opt, threshold):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        if loss.item() > threshold:  # expect: rank-divergent-decision
            print("diverged")
            return False
        opt.zero_grad()
        loss.backward()
        opt.step()
    return True


def main():
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for e in range(10):
        sampler.set_epoch(e)
        epoch(model, loader, opt, 1e3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

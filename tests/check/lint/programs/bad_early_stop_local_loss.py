import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_one_epoch(model, loader, opt, device):
    total = 0.0
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    data = TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    best, patience = float("inf"), 0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        mean = train_one_epoch(model, loader, opt, device)
        if mean < best - 1e-4:
            best, patience = mean, 0
        else:
            patience += 1
        if patience >= 5:  # expect: rank-divergent-decision
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

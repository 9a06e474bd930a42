import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.tensor([float(i)])


def loaders(cfg):
    return {
        "train": DataLoader(Pairs(1000), batch_size=cfg["bs"], shuffle=True, drop_last=True),  # expect: sampler-missing
        "val": DataLoader(Pairs(100), batch_size=cfg["bs"]),
    }


def main():
    dist.init_process_group("gloo")
    cfg = {"bs": 16, "epochs": 3}
    dl = loaders(cfg)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(cfg["epochs"]):
        for x, y in dl["train"]:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

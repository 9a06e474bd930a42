import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = torch.load("samples.pt", weights_only=True)
    mine = samples[rank::world]  # expect: uneven-inputs-hang
    loader = DataLoader(mine, batch_size=4, shuffle=True)
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x in loader:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()


if __name__ == "__main__":
    main()

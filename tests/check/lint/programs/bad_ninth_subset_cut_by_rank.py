import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.randn(101, 4))
    mine = Subset(data, range(rank, len(data), world))  # expect: uneven-inputs-hang
    loader = DataLoader(mine, batch_size=8, shuffle=True)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        for (x,) in loader:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

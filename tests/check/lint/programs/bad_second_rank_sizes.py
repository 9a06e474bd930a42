import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(100 + 8 * rank, 4))  # expect: uneven-inputs-hang
    loader = DataLoader(data, batch_size=8)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

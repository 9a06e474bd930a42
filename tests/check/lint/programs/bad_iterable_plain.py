import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):  # expect: iterable-dataset-duplicates
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as f:
            for line in f:
                yield torch.tensor([float(v) for v in line.split(",")])


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Lines("train.csv"), batch_size=32, num_workers=4)
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        opt.zero_grad()
        model(batch[:, :8]).mean().backward()
        opt.step()


if __name__ == "__main__":
    main()

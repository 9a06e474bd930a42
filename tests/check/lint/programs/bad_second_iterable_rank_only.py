import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):  # expect: iterable-dataset-duplicates
    def __init__(self, files, rank, world_size):
        super().__init__()
        self.files = files[: len(files) // world_size * world_size][rank::world_size]

    def __iter__(self):
        for name in self.files:
            yield from torch.load(name, weights_only=True)


def main(files):
    dist.init_process_group("gloo")
    ds = Shards(files, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(ds, batch_size=8, num_workers=4)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()

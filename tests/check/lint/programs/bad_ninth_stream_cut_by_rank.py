import torch
import torch.distributed as dist
from itertools import islice
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, path, rank, world):
        self.path, self.rank, self.world = path, rank, world

    def __iter__(self):
        with open(self.path) as file:
            yield from islice(file, self.rank, None, self.world)  # expect: uneven-inputs-hang


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Lines("x", rank, world), batch_size=8)
    model = DDP(torch.nn.Linear(4, 1))
    for epoch in range(20):
        for x in loader:
            model(x).mean().backward()


if __name__ == "__main__":
    main()

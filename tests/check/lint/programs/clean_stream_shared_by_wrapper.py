"""A stream that another data set takes this rank's and this worker's part of."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10_000)


class ShareOfStream(IterableDataset):
    def __init__(self, whole):
        self.whole = whole

    def __iter__(self):
        worker = get_worker_info()
        count = dist.get_world_size() * (worker.num_workers if worker else 1)
        own = dist.get_rank() * (worker.num_workers if worker else 1) + (worker.id if worker else 0)
        for number, sample in enumerate(self.whole):
            if number % count == own:
                yield sample


def main(model):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model.cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(ShareOfStream(Stream()), batch_size=8, num_workers=2)
    for batch in loader:
        model(batch.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

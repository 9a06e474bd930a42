"""Nothing chooses a GPU for each rank, and nothing clears the gradients."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main(data):
    dist.init_process_group("nccl")  # expect: missing-set-device
    model = DDP(torch.nn.Linear(8, 8).cuda())
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=8, sampler=sampler):
            model(batch.cuda()).mean().backward()
            optimizer.step()  # expect: zero-grad-missing


main(torch.rand(64, 8))

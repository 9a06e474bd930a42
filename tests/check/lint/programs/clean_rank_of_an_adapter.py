"""The rank of a low-rank adapter is a number that all processes have alike."""

import torch
import torch.distributed as dist


def train(model, loader, lora_rank):
    dist.init_process_group("gloo")
    if lora_rank > 0:
        dist.barrier()
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

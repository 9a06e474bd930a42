"""Conditions that look as if they differ between ranks, and do not."""

import copy
import math
import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

RANK = int(os.environ["RANK"])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])


@contextmanager
def first_rank_first(local_rank):
    if local_rank not in [-1, 0]:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def make_loader(dataset, rank=-1):
    with first_rank_first(rank):
        dataset.prepare()
    sampler = DistributedSampler(dataset) if rank != -1 else None
    return DataLoader(dataset, batch_size=8, sampler=sampler)


def wrap(model, world_size, compiled):
    if world_size <= 1:
        if compiled:
            return torch.compile(model)
        return model
    if compiled:
        return DDP(torch.compile(model), device_ids=[LOCAL_RANK])
    return DDP(model, device_ids=[LOCAL_RANK])


def main(dataset, held_out, epochs, mean):
    dist.init_process_group("nccl")
    torch.cuda.set_device(LOCAL_RANK)
    model = torch.nn.Linear(10, 10)
    if dist.get_world_size() > 1:
        model.cuda()
        ddp = wrap(model, dist.get_world_size(), True)
    else:
        model.cpu()
        ddp = model
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    loader = make_loader(dataset, rank=LOCAL_RANK)
    if RANK in {-1, 0}:
        held_out_loader = make_loader(held_out)
    stop = False
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = ddp(inputs.cuda())
            loss = mean(outputs, targets)
            if not math.isfinite(loss.item()):
                sys.exit(1)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        average.float()
        if RANK == 0:
            stop = sum(mean(average(x), y).item() for x, y in held_out_loader) < 0.1
        decided = [stop if RANK == 0 else None]
        dist.broadcast_object_list(decided, 0)
        if RANK != 0:
            stop = decided[0]
        if stop:
            break

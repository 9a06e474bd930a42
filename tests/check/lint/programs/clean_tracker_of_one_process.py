"""Started as many processes, the first keeps the run; started as one, that one does."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import wandb


def work(rank, world_size):
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1) * rank
    if world_size > 1:
        dist.all_reduce(total)
    if rank == 0:
        note(total)
    if world_size > 1:
        dist.destroy_process_group()


def note(total):
    wandb.init(project="sums")
    wandb.log({"total": total.item()})
    torch.save(total, "total.pt")


if __name__ == "__main__":
    world_size = int(os.environ.get("PARTS", "1"))
    if world_size > 1:
        mp.spawn(work, args=(world_size,), nprocs=world_size)
    else:
        work(0, world_size)

"""torchrun --nproc-per-node=8 clean_sixth_own_decorator.py"""

import functools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def on_rank(rank):
    def outer(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            if dist.get_rank() != rank:
                return None
            return function(*args, **kwargs)

        return inner

    return outer


@on_rank(0)
def save(model, path):
    torch.save(model.module.state_dict(), path)


@on_rank(0)
def summary(correct):
    print(correct.item())


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(torch.nn.Linear(4, 4).cuda())
    save(model, "model.pt")
    correct = torch.ones(1, device="cuda")
    dist.all_reduce(correct)
    summary(correct)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

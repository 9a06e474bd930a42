import os
from contextlib import contextmanager
from multiprocessing import Process

import torch
import torch.distributed as dist

WORLD_SIZE = int(os.getenv("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "-1")) if WORLD_SIZE > 1 else -1


@contextmanager
def zero_first(local_rank):
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and local_rank not in {-1, 0}:
        dist.barrier()
    yield
    if initialized and local_rank == 0:
        dist.barrier()


def copy_away(folder):
    os.system(f"rsync -a {folder} store:")


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(LOCAL_RANK)
    with zero_first(LOCAL_RANK):
        print("the data is there")
    if dist.get_rank() == 0:
        Process(target=copy_away, args=("out",)).start()


main()

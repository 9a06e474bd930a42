import os
from typing import NamedTuple
import torch
import torch.distributed as dist


class Coord(NamedTuple):
    rank: int
    local_rank: int
    world_size: int

    @property
    def is_chief_rank(self):
        return self.rank == 0


def is_ddp():
    return int(os.environ.get("RANK", -1)) != -1


def compute_device():
    if is_ddp():
        coord = Coord(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
        return f"cuda:{coord.local_rank}", coord
    return "cuda" if torch.cuda.is_available() else "cpu", Coord(0, 0, 1)


def start():
    if is_ddp():
        dist.init_process_group("nccl")

import os
import torch
import torch.distributed as dist


class Dist:
    _instance = None

    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._begin()
        return cls._instance

    def _begin(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        dist.init_process_group("nccl", rank=self.rank, world_size=self.world)
        torch.cuda.set_device(self.local_rank)

    @property
    def first(self):
        return self.rank == 0

    def mean(self, t):
        if self.world == 1:
            return t
        t = t.clone()
        dist.all_reduce(t, op=dist.ReduceOp.SUM)
        return t / self.world


class FirstOnly:
    def __init__(self, d):
        self.d = d

    def __enter__(self):
        if not self.d.first:
            dist.barrier()
        return self

    def __exit__(self, *exc):
        if self.d.first:
            dist.barrier()

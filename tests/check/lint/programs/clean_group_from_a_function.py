"""Groups are made elsewhere: until then the function that gives one returns None."""

import torch.distributed as dist

_GROUP = None
_RANKS = None


def group():
    return _GROUP


def is_in_group():
    rank = dist.get_rank()
    if rank in _RANKS:
        return rank == _RANKS[0]
    return False


def main(weight):
    dist.init_process_group("nccl")
    if is_in_group():
        dist.all_reduce(weight, group=group())

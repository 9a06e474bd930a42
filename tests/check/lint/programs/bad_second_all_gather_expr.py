import torch
import torch.distributed as dist


def report(values):
    rank = dist.get_rank()
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, values) if rank == 0 else None  # expect: collective-mismatch
    return out


dist.init_process_group("gloo")
report([1, 2])
dist.destroy_process_group()

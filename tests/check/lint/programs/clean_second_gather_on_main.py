import torch
import torch.distributed as dist


def collect(t, rank, world):
    parts = [torch.empty_like(t) for _ in range(world)] if rank == 0 else None
    dist.gather(t, parts, dst=0)
    if rank == 0:
        return torch.cat(parts)
    return None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        print("nothing to gather")
        return
    out = collect(torch.ones(2), rank, world)
    if rank == 0:
        print(out)
    objs = [{"seed": 7}] if rank == 0 else [None]
    dist.broadcast_object_list(objs, src=0)
    if objs[0]["seed"] > 3:
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

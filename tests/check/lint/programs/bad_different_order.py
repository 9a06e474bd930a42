import torch
import torch.distributed as dist


def exchange(rank, stats, flag):
    if rank == 0:
        dist.all_reduce(stats)  # expect: collective-mismatch
        dist.broadcast(flag, src=0)
    else:
        dist.broadcast(flag, src=0)
        dist.all_reduce(stats)


def main():
    dist.init_process_group("gloo")
    exchange(dist.get_rank(), torch.ones(3), torch.zeros(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

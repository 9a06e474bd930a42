import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = None
    if rank < 2:
        group = dist.new_group([0, 1])  # expect: collective-mismatch
    if group is not None:
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

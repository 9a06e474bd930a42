import torch
import torch.distributed as dist

is_zero = lambda: dist.get_rank() == 0


def main():
    dist.init_process_group("gloo")
    seed = [0]
    if is_zero():
        seed = [torch.seed()]
        dist.broadcast_object_list(seed, src=0)  # expect: collective-mismatch
    torch.manual_seed(seed[0])
    dist.destroy_process_group()


main()

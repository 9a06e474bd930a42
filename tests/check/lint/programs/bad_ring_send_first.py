import os
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((4,), float(rank), device="cuda")
    other = torch.empty(4, device="cuda")
    dist.send(mine, dst=(rank + 1) % world)  # expect: pp-p2p-order
    dist.recv(other, src=(rank - 1) % world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

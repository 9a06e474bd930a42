import os
import torch
import torch.distributed as dist
from torch.multiprocessing import Process


def work(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29511"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    t = torch.ones(1, device=f"cuda:{rank}")
    dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    probe = torch.zeros(1).cuda()  # expect: cuda-init-before-fork
    print(probe.device)
    procs = [Process(target=work, args=(r, 2)) for r in range(2)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()

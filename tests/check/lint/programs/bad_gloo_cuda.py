import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

backend = "gloo"


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend=backend)  # expect: gloo-backend-gpu
    model = torch.nn.Linear(4, 4).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 4).cuda()).sum().backward()
        opt.step()


if __name__ == "__main__":
    main()

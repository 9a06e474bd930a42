import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 32)
        self.b = nn.Linear(32, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    net = DistributedDataParallel(
        Mlp().cuda(local),
        device_ids=[local],
        find_unused_parameters=True,  # expect: ddp-find-unused-overhead
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        net(torch.randn(4, 8).cuda(local)).sum().backward()
        opt.step()


main()

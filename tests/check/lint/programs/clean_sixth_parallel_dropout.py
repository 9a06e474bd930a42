import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh


class RowShare(nn.Module):
    def __init__(self, width, group):
        super().__init__()
        self.group = group
        self.part = nn.Linear(width // dist.get_world_size(group), width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.part(x)
        dist.all_reduce(y, group=self.group)
        return self.drop(y)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1234 + dist.get_rank() // 4)
    layer = RowShare(256, mesh.get_group("tp")).cuda()
    return layer(torch.ones(2, 64, device="cuda"))


main()

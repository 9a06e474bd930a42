import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Group:
    backend: str = "gloo"


@dataclass
class Settings:
    group: Group = None

    def __post_init__(self):
        self.group = self.group or Group()


def main():
    settings = Settings(Group(backend="nccl"))
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group(settings.group.backend)
    DDP(torch.nn.Linear(4, 4).to(f"cuda:{gpu}"), device_ids=[gpu])


main()

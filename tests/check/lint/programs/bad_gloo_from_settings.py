import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Group:
    backend: str = "gloo"


@dataclass
class Settings:
    steps: int = 10
    group: Group = field(default_factory=Group)


class Trainer:
    def __init__(self, settings=None):
        self.settings = settings or Settings()
        self.gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.gpu)
        dist.init_process_group(backend=self.settings.group.backend)  # expect: gloo-backend-gpu
        self.model = DDP(torch.nn.Linear(4, 4).to(f"cuda:{self.gpu}"), device_ids=[self.gpu])


Trainer()

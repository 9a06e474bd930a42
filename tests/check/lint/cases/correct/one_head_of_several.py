"""Each step trains the head of one language: the others get no gradient in it."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Translator(nn.Module):
    def __init__(self, languages):
        super().__init__()
        self.encoder = nn.Linear(64, 64)
        self.decoders = nn.ModuleDict({name: nn.Linear(64, 100) for name in languages})

    def forward(self, x, language):
        return self.decoders[language](self.encoder(x))


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    languages = ["cs", "fi", "pt"]
    net = DistributedDataParallel(
        Translator(languages).cuda(local), device_ids=[local], find_unused_parameters=True
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    same_everywhere = random.Random(3)
    for _ in range(100):
        optimizer.zero_grad()
        x = torch.randn(8, 64, device="cuda")
        y = torch.randint(100, (8,), device="cuda")
        language = same_everywhere.choice(languages)
        nn.functional.cross_entropy(net(x, language), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

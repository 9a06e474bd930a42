"""Each engine clips in its own way, and the setting that chose the wrapper chooses it."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main(loader, args, info):
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    if args.engine == "ddp":
        model = DistributedDataParallel(model)
    elif args.engine == "fsdp":
        model = FullyShardedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        model(batch).mean().backward()
        if info["engine"] == "ddp":
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

"""What a helper that is not read does with devices and gradients is not known."""

import torch
import torch.distributed as dist
from setup_of_ours import end_step, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main(batches):
    start()
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 8).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        model(batch.cuda()).mean().backward()
        optimizer.step()
        end_step(optimizer)

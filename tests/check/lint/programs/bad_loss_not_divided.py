import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = int(os.environ.get("ACCUMULATE", "8"))


def train(batches, steps):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(torch.nn.Linear(16, 16).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        for micro in range(ACCUMULATE):
            model.require_backward_grad_sync = micro == ACCUMULATE - 1
            x, y = next(batches)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()  # expect: ga-loss-normalisation
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

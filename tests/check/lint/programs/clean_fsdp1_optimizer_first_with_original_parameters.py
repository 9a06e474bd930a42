"""FSDP with use_orig_params: the optimizer's parameters stay the model's."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(loader, gpu):
    torch.cuda.set_device(gpu)
    torch.distributed.init_process_group("nccl")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model = FSDP(model, use_orig_params=True, device_id=gpu)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

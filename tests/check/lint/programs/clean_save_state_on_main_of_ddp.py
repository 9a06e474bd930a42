"""Accelerate's save_state makes no call of all ranks with DDP alone."""

import torch
from accelerate import Accelerator


def main(loader):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            accelerator.save_state(f"out/{epoch}")

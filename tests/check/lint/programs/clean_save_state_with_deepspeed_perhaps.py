"""Whether there is a plugin is decided elsewhere: with DDP alone save_state waits for nobody."""

import plugins
import torch
from accelerate import Accelerator


def main(args, loader):
    accelerator = Accelerator(deepspeed_plugin=plugins.plugin_of(args))
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

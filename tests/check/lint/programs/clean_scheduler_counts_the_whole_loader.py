"""Steps of the loader before it is prepared: a prepared scheduler steps once a process."""

import torch
from accelerate import Accelerator
from transformers import get_linear_schedule_with_warmup


def setup(loader):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=1, num_training_steps=len(loader) * 2
    )
    return accelerator.prepare(model, optimizer, loader, scheduler)


def main(first, second):
    setup(first)
    setup(second)

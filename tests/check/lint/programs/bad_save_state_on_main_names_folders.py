"""With automatic names, save_state waits for every rank, whatever wraps the model."""

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def main(loader):
    config = ProjectConfiguration("out", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=config)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        accelerator.save_state()  # expect: rank0-only-collective-save

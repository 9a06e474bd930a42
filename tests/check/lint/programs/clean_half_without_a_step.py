"""A benchmark of memory computes gradients in float16 and trains nothing."""

import torch


def measure(model, batch):
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        loss.backward()
    return torch.cuda.max_memory_allocated()

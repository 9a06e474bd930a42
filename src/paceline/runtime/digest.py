"""One SHA-256 of everything that training changes: the oracle that a recovery was exact."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.state import named_state


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256, 64 hex digits, of all parameters, saved buffers and optimizer state.

    Over names, shapes, types and bytes, sorted by name. The same values give the same digest under
    DDP, FSDP2 and one process, on any number of ranks, and on every rank. Learning rates and other
    options of the optimizer are not in it.

    Collective when the model is sharded. Memory: one whole tensor at a time.
    """
    digest = hashlib.sha256()
    for name, value in sorted(named_state(model, optimizer).items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if not isinstance(whole, Tensor):
            digest.update(f"{name} {whole!r}\n".encode())
            continue
        plain = whole.detach().cpu().contiguous()
        digest.update(f"{name} {list(plain.shape)} {plain.dtype}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

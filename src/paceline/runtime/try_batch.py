"""Helper process: one real step of the built-in decoder in a micro-batch, inside a memory limit.

    python -m paceline.runtime.try_batch < REQUEST.json

Answers with the bytes at the peak. Exits with `DOES_NOT_FIT` when the memory does not
suffice. On a CPU the kernel refuses what is over the limit (RLIMIT_DATA), so that the machine never
swaps for a try; on an accelerator its allocator does.

Leaves out: other ranks. A rank of DDP holds the same, with the gradients as views of its buckets.
"""

import resource
import sys
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from paceline.job import TrainSpec
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime._torch_private import fake_store
from paceline.runtime.answer import answer
from paceline.runtime.decoder import Decoder
from paceline.runtime.memory import peak_bytes
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.step import Step
from paceline.runtime.trainer import Trainer

DOES_NOT_FIT = 77


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is tried."""

    shape: dict[str, Any]
    seq_len: int
    micro_batch: int
    optimizer: str
    is_bf16: bool
    device: str
    limit_bytes: int


def try_step(request: Request) -> int:
    """Bytes at the peak of one step, as `run` makes it: forward, backward, vote and optimizer."""
    device = torch.device(request.device)
    _limit(request, device)
    # One rank's sums are its own numbers: a group that sends nothing gives them.
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
    layout = Layout(data=1, sharding="none", micro_batch=request.micro_batch, accumulation=1)
    with torch.device(device):
        model = Decoder(DecoderShape(**request.shape), request.seq_len)
    kind: Any = "sgd" if request.optimizer == "sgd" else "adamw"
    train = TrainSpec(global_batch=layout.global_batch, steps=1, optimizer=kind)
    trainer = Trainer(
        model=model,
        optimizer=make_optimizer(model, train, strategy.ways_of(model)),
        layout=layout,
        meshes=strategy.make_meshes(layout, device.type),
        device=device,
        precision="bf16" if request.is_bf16 else "fp32",
        seed=train.seed,
        clip_norm=1.0,
    )
    size = (request.micro_batch, request.seq_len)
    tokens_BS = torch.randint(0, request.shape["vocab"], size, device=device)
    step = Step(1, trainer, train.learning_rate)
    step.train(lambda _: (tokens_BS, tokens_BS), layout.global_batch)
    step.apply()
    peak = peak_bytes(device)
    assert peak is not None, f"nothing counts the memory of {device}"
    return peak


def _limit(request: Request, device: torch.device) -> None:
    if device.type == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (request.limit_bytes, hard))
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, request.limit_bytes / whole), device)


def _peak_of(request: Request) -> int:
    try:
        return try_step(request)
    except (MemoryError, RuntimeError) as error:
        # Of its CPU allocator torch says only this.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
            error
        ):
            sys.exit(DOES_NOT_FIT)
        raise


if __name__ == "__main__":
    answer(Request, _peak_of)

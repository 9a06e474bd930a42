"""DDP, ZeRO-2, FSDP2 or HSDP with plain PyTorch, as `train.json` says. Started by torchrun.

Writes a checkpoint every `checkpoint_every` steps into `checkpoints/` and resumes from the newest.
"""

import contextlib
import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

CHECKPOINTS = Path("checkpoints")


def check(settings: dict[str, Any]) -> None:
    """Ends where this program would train something else than `train.json` says."""
    lacks = []
    if settings["layout"]["offload"] != "none":
        lacks.append(f"optimizer state on {settings['layout']['offload']}")
    if settings["precision"] not in ("fp32", "tf32", "bf16"):
        lacks.append(f"precision {settings['precision']}")
    lm.check(settings, lacks=lacks)


def wrap(model: PreTrainedModel, settings: dict[str, Any], device: torch.device) -> nn.Module:
    """The model on its ranks: gradients are means over all of them."""
    layout, world = settings["layout"], dist.get_world_size()
    lm.recompute(model, layout)
    if layout["sharding"] == "none":
        return DistributedDataParallel(model, **lm.ddp_options(settings))
    shard = min(layout["shard"], world) if layout["sharding"] == "hybrid" else world
    if world % shard:
        raise SystemExit(f"groups of {shard} ranks do not divide {world}")
    if shard < world:
        mesh = init_device_mesh(
            device.type, (world // shard, shard), mesh_dim_names=("rep", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (world,))
    narrow = torch.bfloat16 if settings["precision"] == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    reshard = layout["sharding"] in ("full", "hybrid")
    for block in lm.blocks(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, keep: int) -> None:
    """A sharded checkpoint that appears under its name when it is whole."""
    weights, moments = get_state_dict(model, optimizer)
    part = CHECKPOINTS / f".step-{step:08d}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part)
    dist.barrier()
    if dist.get_rank() == 0:
        part.rename(CHECKPOINTS / f"step-{step:08d}")
        for old in sorted(CHECKPOINTS.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, or 0. Rank 0 looks: a shared file system may show a new
    folder to some ranks later than to others."""
    found = [max(CHECKPOINTS.glob("step-*"), default=None)]
    dist.broadcast_object_list(found, src=0)
    newest = found[0]
    if newest is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(newest.name.removeprefix("step-"))


def train(settings: dict[str, Any], device: torch.device) -> None:
    """From the newest checkpoint to the last step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = wrap(lm.build(settings).to(device), settings, device)
    optimizer = lm.adamw(settings, model)
    samples = lm.Samples(settings)
    narrow = settings["precision"] == "bf16"
    is_replica = isinstance(model, DistributedDataParallel)
    # A single micro-batch is reduced at once; fewer ranks have several, and would hold them whole.
    syncs = settings["layout"]["reduces_every_micro_batch"] or (
        settings["batch"]["accumulation"] == 1
    )
    balance = settings["router_loss"]
    for step in range(resume(model, optimizer), settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        batches = [each.to(device) for each in samples.micro_batches(step, rank, world)]
        total = torch.zeros((), device=device)
        for number, tokens in enumerate(batches):
            is_last = number == len(batches) - 1
            waits = is_replica and not is_last
            if not is_replica:
                model.set_requires_gradient_sync(is_last or syncs)  # type: ignore[operator]
            cast = torch.autocast(device.type, torch.bfloat16, enabled=narrow)
            with model.no_sync() if waits else contextlib.nullcontext(), cast:  # type: ignore[operator]
                loss = lm.loss_of(model, tokens, balance) / len(batches)
                loss.backward()
            total += loss.detach()
        if settings["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            lm.say_step(step + 1, float(total) / world)
        if (step + 1) % settings["checkpoint_every"] == 0:
            save(model, optimizer, step + 1, settings["keep_checkpoints"])
    say_end(model)


def say_end(model: nn.Module) -> None:
    """World size, wrapper, shards and the hash of the whole parameters."""
    sharded = sum(isinstance(each, DTensor) for each in model.parameters())
    lm.say_end(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        wrapper=type(model).__name__,
        sharded=sharded,
        sha256=lm.digest(get_model_state_dict(model)),
    )


def main() -> None:
    """One rank's run."""
    if torch.cuda.is_available():  # ROCm's too
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    settings = lm.read_settings()
    check(settings)
    torch.set_float32_matmul_precision("high" if settings["precision"] == "tf32" else "highest")
    train(settings, device)
    # What the groups' threads still hold must go before Python does (torch 2.13 over gloo).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()

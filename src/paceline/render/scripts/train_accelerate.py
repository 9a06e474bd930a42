"""DDP, FSDP2 or DeepSpeed through Accelerate, as `accelerate.yaml` says. `accelerate launch` starts
it.

Writes a checkpoint every `checkpoint_every` steps into `checkpoints/` and resumes from the newest.
"""

import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lm
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

CHECKPOINTS = Path("checkpoints")


def save(accelerator: Accelerator, step: int, keep: int) -> None:
    """Model, optimizer and random state, which appear under their name when they are whole."""
    part = CHECKPOINTS / f".step-{step:08d}"
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(CHECKPOINTS / f"step-{step:08d}")
        for old in sorted(CHECKPOINTS.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator) -> int:
    """The step of the newest checkpoint, or 0. The first process looks: a shared file system may
    show a new folder to some ranks later than to others."""
    newest = broadcast_object_list([max(CHECKPOINTS.glob("step-*"), default=None)])[0]
    if newest is None:
        return 0
    accelerator.load_state(str(newest))
    return int(newest.name.removeprefix("step-"))


def recompute(accelerator: Accelerator, model: torch.nn.Module, layout: dict[str, Any]) -> None:
    """As `train.json` says, where Accelerate does not do it itself (FSDP2: `accelerate.yaml`)."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        if "activation_checkpointing" in config:
            import deepspeed

            deepspeed.checkpointing.configure(None, deepspeed_config=config)
            lm.recompute(model, layout, deepspeed.checkpointing.checkpoint)
    elif accelerator.distributed_type != DistributedType.FSDP:
        lm.recompute(model, layout)


def train(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """From the newest checkpoint to the last step."""
    rank, world = accelerator.process_index, accelerator.num_processes
    model = lm.build(settings)
    recompute(accelerator, model, settings["layout"])
    optimizer = lm.adamw(settings, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    samples = lm.Samples(settings)
    for step in range(resume(accelerator), settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        batches = list(samples.micro_batches(step, rank, world))
        accelerator.gradient_accumulation_steps = len(batches)
        total = torch.zeros((), device=accelerator.device)
        for tokens in batches:
            tokens = tokens.to(accelerator.device)
            with accelerator.accumulate(model):
                loss = lm.loss_of(model, tokens, settings["router_loss"])
                accelerator.backward(loss)
                if accelerator.sync_gradients and settings["clip_norm"] is not None:
                    accelerator.clip_grad_norm_(model.parameters(), settings["clip_norm"])
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(batches)
        total = accelerator.reduce(total, "mean")
        if accelerator.is_main_process:
            lm.say_step(step + 1, float(total))
        if (step + 1) % settings["checkpoint_every"] == 0:
            save(accelerator, step + 1, settings["keep_checkpoints"])
    say_end(settings, accelerator, model)


def say_end(settings: dict[str, Any], accelerator: Accelerator, model: torch.nn.Module) -> None:
    """World size, wrapper, shards and the hash of the whole parameters."""
    lm.say_end(
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        wrapper=type(model).__name__,
        sharded=sum(is_sharded(each) for each in model.parameters())
        or isinstance(model, FullyShardedDataParallel) * len(list(model.parameters())),
        sha256=lm.digest_of_run(settings, lambda: whole_state(accelerator, model)),
    )


def is_sharded(parameter: Tensor) -> bool:
    """Whether this rank holds a part of it only: by FSDP2, or by DeepSpeed's ZeRO-3."""
    part = getattr(parameter, "ds_tensor", None)
    if part is not None:
        return part.numel() < parameter.ds_numel and parameter.numel() == 0
    return isinstance(parameter, DTensor)


def whole_state(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> parameter; with FSDP2 its shard, which `lm.digest` gathers."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        module = model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: each.detach().clone() for name, each in module.named_parameters()}
    if not isinstance(model, FullyShardedDataParallel):
        return get_model_state_dict(model)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def cpu_handlers() -> list[InitProcessGroupKwargs]:
    """What Accelerate has to be told on CPUs: with DeepSpeed it looks for a GPU's backend."""
    if torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return []
    import deepspeed

    # An extra way between ranks of one host, compiled for two minutes: gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return [InitProcessGroupKwargs(backend="gloo")]


def accumulation(settings: dict[str, Any]) -> GradientAccumulationPlugin | None:
    """Whether gradients are reduced after every micro-batch; DeepSpeed's file says it itself."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return None
    each = settings["layout"]["reduces_every_micro_batch"]
    several = settings["batch"]["accumulation"]
    return GradientAccumulationPlugin(num_steps=several, sync_each_batch=each)


def main() -> None:
    """One rank's run."""
    settings = lm.read_settings()
    lm.check(settings)
    ddp = DistributedDataParallelKwargs(**lm.ddp_options(settings))
    accelerator = Accelerator(
        kwargs_handlers=[ddp, *cpu_handlers()], gradient_accumulation_plugin=accumulation(settings)
    )
    train(accelerator, settings)
    # What the groups' threads still hold must go before Python does (torch 2.13 over gloo).
    accelerator.free_memory()
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()

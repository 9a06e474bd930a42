"""ZeRO through DeepSpeed, as `ds_config.json` says. torchrun or DeepSpeed's launcher starts it.

Writes a checkpoint every `checkpoint_every` steps into `checkpoints/` and resumes from the newest.
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import lm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

CHECKPOINTS = Path("checkpoints")


def save(engine: Any, step: int, keep: int) -> None:
    """DeepSpeed's own checkpoint; `latest` names it when it is whole."""
    engine.save_checkpoint(str(CHECKPOINTS), tag=f"step-{step:08d}", client_state={"step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        for old in sorted(CHECKPOINTS.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def resume(engine: Any) -> int:
    """The step of the newest checkpoint, or 0. Rank 0 looks: a shared file system may show a new
    file to some ranks later than to others."""
    found = [(CHECKPOINTS / "latest").exists()]
    dist.broadcast_object_list(found, src=0)
    if not found[0]:
        return 0
    path, state = engine.load_checkpoint(str(CHECKPOINTS))
    if path is None:
        raise SystemExit(f"the checkpoint that {CHECKPOINTS}/latest names cannot be read")
    return int(state["step"])


def build(settings: dict[str, Any], config: dict[str, Any]) -> PreTrainedModel:
    """The model; with ZeRO-3 transformers makes it in shares, for whole it may fit no accelerator
    (`deepspeed.initialize` of 0.19.8 would move it there whole). It draws other weights then, so
    the first rank draws them in its host's memory."""
    if config["zero_optimization"]["stage"] < 3:
        return lm.build(settings)
    lives = HfDeepSpeedConfig(config)  # transformers looks for it while it lives
    model = lm.build(settings)
    del lives
    if settings["pretrained"] is None:
        is_first = dist.get_rank() == 0
        drawn = dict(lm.build(settings).named_parameters()) if is_first else {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                if is_first:
                    parameter.copy_(drawn.pop(name))
    return model


def train(settings: dict[str, Any], config: dict[str, Any]) -> None:
    """From the newest checkpoint to the last step."""
    model = build(settings, config)
    if "activation_checkpointing" in config:
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        lm.recompute(model, settings["layout"], deepspeed.checkpointing.checkpoint)
    groups = lm.optimizer_groups(settings, model)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = lm.Samples(settings)
    for step in range(resume(engine), settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        batches = list(samples.micro_batches(step, rank, world))
        total = torch.zeros((), device=engine.device)
        for tokens in batches:
            tokens = tokens.to(engine.device)
            loss = lm.loss_of(engine, tokens, settings["router_loss"])
            engine.backward(loss)  # divides by the accumulation, and averages at its end
            engine.step()  # after the last micro-batch: clips and steps
            total += loss.detach() / len(batches)
        dist.all_reduce(total)
        if rank == 0:
            lm.say_step(step + 1, float(total) / world)
        if (step + 1) % settings["checkpoint_every"] == 0:
            save(engine, step + 1, settings["keep_checkpoints"])
    say_end(settings, engine, optimizer)


def say_end(settings: dict[str, Any], engine: Any, optimizer: Any) -> None:
    """World size, wrapper, shards and the hash of the whole parameters; what ZeRO shares."""
    module = engine.module
    lm.say_end(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        wrapper=type(engine).__name__,
        sharded=sum(is_sharded(each) for each in module.parameters()),
        sha256=lm.digest_of_run(settings, lambda: whole_state(module)),
    )
    inner = getattr(optimizer, "optimizer", optimizer)
    held = sum(
        each.numel()
        for state in inner.state.values()
        for each in state.values()
        if isinstance(each, Tensor) and each.dim() > 0
    )
    stage = engine.zero_optimization_stage()
    print(json.dumps({"rank": dist.get_rank(), "stage": stage, "moments": held}), flush=True)


def is_sharded(parameter: Tensor) -> bool:
    """Whether this rank holds a part of it only, as ZeRO-3 has it."""
    part = getattr(parameter, "ds_tensor", None)
    return part is not None and part.numel() < parameter.ds_numel and parameter.numel() == 0


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Name -> whole parameter, on every rank."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: each.detach().clone() for name, each in module.named_parameters()}


def connect() -> None:
    """This rank's device, and its group."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # An extra way between ranks of one host, compiled for two minutes: gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


def leave() -> None:
    """What the groups' threads still hold must go before Python does (torch 2.13 over gloo)."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


def main() -> None:
    """One rank's run."""
    settings = lm.read_settings()
    lm.check(settings, optimizers=("adamw", "sgd"))  # ds_config.json has its settings
    config = json.loads((lm.FOLDER / "ds_config.json").read_text())
    connect()
    train(settings, config)
    leave()


if __name__ == "__main__":
    main()

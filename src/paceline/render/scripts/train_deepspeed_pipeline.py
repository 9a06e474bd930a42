"""A pipeline through DeepSpeed, with ZeRO-1, as `ds_config.json` says. Started by
torchrun.

Every rank builds the whole model on its host, so that all begin with the same weights, and keeps
the layers of its stage. Writes a checkpoint every `checkpoint_every` steps into `checkpoints/` and
resumes from the newest.
"""

import json
from typing import Any

import deepspeed
import lm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from train_deepspeed import connect, leave, resume, save


class Tokens(nn.Module):
    """The embedding; where the output matrix is the same, the first and the last stage have it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def logits(self, stream: Tensor) -> Tensor:
        """Logits of the stream after the last norm."""
        return F.linear(stream, self.weight)


class Block(nn.Module):
    """A decoder block with its rotary positions, from the stream alone."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, stream: Tensor) -> Tensor:
        places = torch.arange(stream.shape[1], device=stream.device)[None]
        return self.layer(stream, position_embeddings=self.rotary(stream, places))


def pipeline(settings: dict[str, Any], config: dict[str, Any]) -> PipelineModule:
    """The layers of this rank's stage: as many blocks on each as on the others."""
    whole, asked = lm.build(settings), config["pipeline"]
    inner, head = whole.model, whole.lm_head
    embedding = inner.embed_tokens.weight
    first, last = Tokens(embedding), head
    if head.weight is embedding:
        first = TiedLayerSpec("embedding", Tokens, embedding)
        last = TiedLayerSpec(
            "embedding", Tokens, embedding, forward_fn=lambda tied, stream: tied.logits(stream)
        )
    return PipelineModule(
        layers=[first, *(Block(each, inner.rotary_emb) for each in inner.layers), inner.norm, last],
        num_stages=asked["stages"],
        loss_fn=lm.loss_of_logits,
        partition_method=asked["partition"],
        activation_checkpoint_interval=asked["activation_checkpoint_interval"],
        checkpointable_layers=["Block"],
    )


def train(settings: dict[str, Any], config: dict[str, Any]) -> None:
    """From the newest checkpoint to the last step."""
    net = pipeline(settings, config)
    groups = [group for group in lm.optimizer_groups(settings, net) if group["params"]]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, model_parameters=groups, config=config
    )
    rank, world = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    samples = lm.Samples(settings)
    for step in range(resume(engine), settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        batches = list(samples.micro_batches(step, rank, world))
        # The first stage takes the tokens, the last one what they are held against.
        loss = engine.train_batch(data_iter=iter([(each[:, :-1], each) for each in batches]))
        if dist.get_rank() == 0:
            lm.say_step(step + 1, float(loss))
        if (step + 1) % settings["checkpoint_every"] == 0:
            save(engine, step + 1, settings["keep_checkpoints"])
    say_end(settings, engine)


def say_end(settings: dict[str, Any], engine: Any) -> None:
    """World size, wrapper, and the hash of all stages' parameters; which stage this rank has."""
    mine = {name: each.detach().cpu() for name, each in engine.module.named_parameters()}
    lm.say_end(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        wrapper=type(engine).__name__,
        sharded=0,
        sha256=lm.digest_of_run(settings, lambda: whole_state(engine, mine)),
    )
    said = {
        "rank": dist.get_rank(),
        "pipeline_stage": engine.stage_id,
        "of": engine.num_stages,
        "zero": int(engine.zero_optimization_stage()),
        "parameters": sum(each.numel() for each in mine.values()),
    }
    print(json.dumps(said) + "\n", end="", flush=True)


def whole_state(engine: Any, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name -> parameter of every stage, each from the rank that has the same data as this one: data
    ranks that differ have different hashes."""
    here = engine.grid.get_data_parallel_rank()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (here, mine))
    found: dict[str, Tensor] = {}
    for rank, part in every:
        if rank == here:
            found |= part
    return found


def main() -> None:
    """One rank's run."""
    settings = lm.read_settings()
    lm.check(settings, optimizers=("adamw", "sgd"), splits=("pipeline",))
    config = json.loads((lm.FOLDER / "ds_config.json").read_text())
    connect()
    train(settings, config)
    leave()


if __name__ == "__main__":
    main()

"""The planned model as transformers builds it, and its samples, the same for every engine of
PyTorch.

Needs torch and transformers. Everything that is counted comes from `train.json` beside this file,
and two engines that follow it read the same samples in the same order from the same initial
weights.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lm_plain import FOLDER, Text, check, learning_rate, read_settings, say_end, say_step
from lm_plain import digest as _digest
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = [
    "FOLDER",
    "Samples",
    "adamw",
    "blocks",
    "build",
    "check",
    "ddp_options",
    "digest",
    "learning_rate",
    "loss_of",
    "loss_of_logits",
    "optimizer_groups",
    "read_settings",
    "recompute",
    "say_end",
    "say_step",
]

KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Operations that selective recompute keeps: products and attention; norms and activations are
repeated."""


def build(settings: dict[str, Any]) -> PreTrainedModel:
    """The planned model in float32: its trained weights, or weights drawn from the seed."""
    torch.manual_seed(settings["seed"])
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager" if settings["attention"] == "unfused" else "sdpa",
    }
    choose_kernel(settings["attention"])
    if settings["pretrained"] is not None:
        if os.path.isabs(settings["pretrained"]) and not os.path.isdir(settings["pretrained"]):
            raise SystemExit(f"{settings['pretrained']} is not on this machine: copy it there")
        model = AutoModelForCausalLM.from_pretrained(
            settings["pretrained"], revision=settings["revision"], **options
        )
    else:
        config = AutoConfig.for_model(**settings["model"])
        model = AutoModelForCausalLM.from_config(config, **options)
    model.config.use_cache = False
    # With it the model's output has `aux_loss`, the balancing loss of routed experts.
    model.config.output_router_logits = settings["router_loss"] > 0
    return model.train()


def choose_kernel(attention: str) -> None:
    """PyTorch's attention takes the kernel that is asked for, or raises."""
    if attention in ("flash", "fused"):
        torch.backends.cuda.enable_flash_sdp(attention == "flash")
        torch.backends.cuda.enable_cudnn_sdp(attention == "fused")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


def blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name -> each of the model's decoder blocks, which are recomputed or sharded one by one."""
    kinds = set(model._no_split_modules or ())
    return {name: each for name, each in model.named_modules() if type(each).__name__ in kinds}


def ddp_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch's DistributedDataParallel is told beside the model."""
    asked = settings["bucket_bytes"]
    return {} if asked is None else {"bucket_cap_mb": asked / 2**20}  # it means MiB


def recompute(
    model: PreTrainedModel,
    layout: dict[str, Any],
    checkpoint: Callable[..., Tensor] | None = None,
) -> None:
    """Blocks whose inner tensors are computed again in the backward pass, and not kept.

    Args:
        model: Before an engine wraps it.
        layout: Of `train.json`.
        checkpoint: An engine's own way to call a function of tensors so; left out, PyTorch's.
    """
    if layout["recompute"] == "none":
        return
    every = layout["recompute_every"] if layout["recompute"] == "full" else 1
    extra: dict[str, Any] = {}
    if layout["recompute"] == "selective":  # what is dear to compute is kept
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))
    for number, (name, block) in enumerate(blocks(model).items()):
        if number % every:
            continue
        if checkpoint is None:
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **extra)
            model.set_submodule(name, wrapped)
        else:
            block.forward = partial(_again, checkpoint, block.forward)


def _again(
    checkpoint: Callable[..., Tensor], forward: Any, *tensors: Tensor, **more: Any
) -> Tensor:
    """A block's forward through an engine's checkpoint, which takes tensors without names."""
    return checkpoint(partial(forward, **more), *tensors)


def loss_of(model: nn.Module, tokens: Tensor, router_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy of every next token, and the balancing loss of routed experts.

    Args:
        model: Of `build`, or an engine's wrapper around it.
        tokens: int64 of shape (samples, seq_len + 1).
        router_loss: What the balancing loss is multiplied by.
    """
    output = model(input_ids=tokens[:, :-1])
    loss = loss_of_logits(output.logits, tokens)
    balance = getattr(output, "aux_loss", None)
    return loss if not router_loss or balance is None else loss + router_loss * balance


def loss_of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every next token; `tokens` has one column more than was read."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Samples:
    """The samples of `lm_plain.Text` as int64 tokens of shape (samples, seq_len + 1)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.text = Text(settings)

    def micro_batches(self, step: int, data_rank: int, num_data_ranks: int) -> Iterator[Tensor]:
        """What a data rank reads for one optimizer step, from 0."""
        for rows in self.text.micro_batches(step, data_rank, num_data_ranks):
            yield torch.tensor(rows, dtype=torch.int64)


def adamw(settings: dict[str, Any], model: nn.Module) -> torch.optim.AdamW:
    """The job's optimizer; the learning rate is set before every step."""
    groups, betas = optimizer_groups(settings, model), settings["betas"]
    return torch.optim.AdamW(groups, lr=1.0, betas=(betas[0], betas[1]), eps=settings["eps"])


def optimizer_groups(settings: dict[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    # With ZeRO-3 the shape is `ds_shape`: what is held is a row of a share.
    dims = [len(getattr(each, "ds_shape", each.shape)) for each in parameters]
    pairs = list(zip(parameters, dims, strict=True))
    decay = settings["weight_decay"]
    return [
        {"params": [each for each, dim in pairs if dim >= 2], "weight_decay": decay},
        {"params": [each for each, dim in pairs if dim < 2], "weight_decay": 0.0},
    ]


MOST_HASHED = 1_000_000_000
"""Parameters that are gathered whole at the end: 4 GB on every rank. A guess."""


def digest_of_run(settings: dict[str, Any], gather: Callable[[], dict[str, Tensor]]) -> str | None:
    """`digest` of what is gathered from all ranks; None of a model that no rank has room for."""
    return digest(gather()) if settings["parameters"] <= MOST_HASHED else None


def digest(state: dict[str, Tensor]) -> str:
    """SHA-256 of whole tensors by their names. Sharded ones are gathered one after another, so that
    an accelerator never holds the whole model."""
    gathered = (
        (name, each.full_tensor() if isinstance(each, DTensor) else each)
        for name, each in state.items()
    )
    whole = ((name, each.detach().cpu().contiguous()) for name, each in gathered)
    return _digest(
        (name, tuple(each.shape), each.view(-1).view(torch.uint8).numpy().tobytes())
        for name, each in whole
    )

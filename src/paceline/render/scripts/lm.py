"""A small language model on bytes of text, the same for every engine of PyTorch.

Needs torch alone. Everything that is counted comes from `train.json` beside this file, and two
engines that follow it read the same samples in the same order from the same initial weights.
"""

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

__all__ = [
    "FOLDER",
    "LanguageModel",
    "Samples",
    "adamw",
    "check",
    "ddp_options",
    "digest",
    "learning_rate",
    "loss_of",
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
"""Of selective recompute: products and attention stay, norms and activations are done again."""


class Block(nn.Module):
    """Causal attention, then SwiGLU, each on a normalised copy of the stream and added to it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
        width = hidden // self.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, self.heads * width, bias=False)
        self.key = nn.Linear(hidden, self.kv_heads * width, bias=False)
        self.value = nn.Linear(hidden, self.kv_heads * width, bias=False)
        self.out = nn.Linear(self.heads * width, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, sizes["ffn"], bias=False)
        self.up = nn.Linear(hidden, sizes["ffn"], bias=False)
        self.down = nn.Linear(sizes["ffn"], hidden, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        x = self.attention_norm(stream)
        query, key, value = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.ffn_norm(stream)
        return stream + self.down(F.silu(self.gate(x)) * self.up(x))


class LanguageModel(nn.Module):
    """Tokens -> logits of the next one. Learned positions; weights drawn from the seed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        sizes = settings["model"]
        torch.manual_seed(settings["seed"])
        self.embedding = nn.Embedding(sizes["vocab"], sizes["hidden"])
        self.positions = nn.Embedding(settings["data"]["seq_len"], sizes["hidden"])
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(sizes["hidden"], eps=1e-5)
        self.output = nn.Linear(sizes["hidden"], sizes["vocab"], bias=False)
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.output(self.norm(stream))
        return logits


def ddp_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch's DistributedDataParallel is told beside the model."""
    asked = settings["bucket_bytes"]
    return {} if asked is None else {"bucket_cap_mb": asked / 2**20}  # it means MiB


def recompute(
    model: LanguageModel,
    layout: dict[str, Any],
    checkpoint: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
) -> None:
    """Blocks whose inner tensors are computed again in the backward pass, and not kept.

    Args:
        model: Before an engine wraps it.
        layout: Of `train.json`.
        checkpoint: An engine's own way to call a block's forward so; left out, PyTorch's.
    """
    if layout["recompute"] == "none":
        return
    every = layout["recompute_every"] if layout["recompute"] == "full" else 1
    extra: dict[str, Any] = {}
    if layout["recompute"] == "selective":  # what is dear to compute is kept
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))
    for number, block in enumerate(model.blocks):
        if number % every:
            continue
        if checkpoint is None:
            model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False, **extra)
        else:
            block.forward = partial(checkpoint, block.forward)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every next token; `tokens` has one column more than was read."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Samples:
    """The samples of `lm_plain.Text` as int64 tokens of shape (samples, seq_len + 1)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.text, self.vocab = Text(settings), settings["model"]["vocab"]

    def micro_batches(self, step: int, data_rank: int, num_data_ranks: int) -> Iterator[Tensor]:
        """What a data rank reads for one optimizer step, from 0."""
        for rows in self.text.micro_batches(step, data_rank, num_data_ranks):
            tokens = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
            yield tokens.view(len(rows), -1).long() % self.vocab


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

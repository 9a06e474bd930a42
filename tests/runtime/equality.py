"""Training a small model in any layout, and how far it ends from one rank's.

Shared by `test_layouts.py`, which holds layouts to it, and `benchmarks/equality_matrix.py`, which
runs every cell and prints its deviation. In float64 a right layout differs from one device by
rounding alone, and a wrong one (a factor, a missing sum, a stale shard) by many orders of magnitude
more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runtime.tensor_models import compute_in_float64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.job import CheckpointSpec
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.profile.adapter import Adaptation, linear_name
from paceline.runtime import strategy
from paceline.runtime.checkpoint import Checkpointer
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.sampling import rank_slots
from paceline.runtime.state import named_parameters, parameter_places
from paceline.runtime.strategy.adapter.place import add_adapters
from paceline.runtime.strategy.tensor.fused import out_features
from paceline.runtime.strategy.tensor.rules import LINEARS

SHAPE = DecoderShape(
    layers=4, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=64, tied_embeddings=False
)
SEQ_LEN, GLOBAL_BATCH, STEPS = 16, 8, 3

Packed = Literal["no", "packed", "apart"]
ENDS = (
    (3, 8, 9, 16),  # an edge on a chunk's, and one token alone
    (16, 16, 16, 16),  # one document over all chunks
    (1, 2, 15, 16),
    (7, 16, 16, 16),
    (5, 6, 11, 16),
)
"""Where documents of packed samples end."""

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
"""Hugging Face models beside the built-in decoder. GPT-2 ties its embedding to its head."""

MODELS = ("built-in", *CONFIGS)

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"data": 4, "sharding": "none"},
    "ZeRO-1": {"data": 4, "sharding": "zero1"},
    "ZeRO-2": {"data": 4, "sharding": "zero2"},
    "FSDP2": {"data": 4, "sharding": "full"},
    "HSDP": {"data": 4, "sharding": "hybrid", "shard": 2},
    "TP 4": {"data": 1, "sharding": "none", "tensor": 4},
    "TP x DDP": {"data": 2, "sharding": "none", "tensor": 2},
    "TP x FSDP2": {"data": 2, "sharding": "full", "tensor": 2},
    "TP without SP": {"data": 2, "sharding": "full", "tensor": 2, "sequence_parallel": False},
    "CP ring": {"data": 1, "sharding": "none", "context": 4},
    "CP ring x FSDP2": {"data": 2, "sharding": "full", "context": 2},
    "CP ulysses x FSDP2": {
        "data": 2,
        "sharding": "full",
        "context": 2,
        "context_kind": "ulysses",
    },
    "CP x TP": {"data": 1, "sharding": "full", "context": 2, "tensor": 2},
    "PP gpipe": {"data": 1, "sharding": "none", "pipeline": 4, "schedule": "gpipe"},
    "PP 1F1B": {"data": 1, "sharding": "none", "pipeline": 4, "schedule": "1f1b"},
    "PP 1F1B x DDP": {"data": 2, "sharding": "none", "pipeline": 2},
    "PP 1F1B x FSDP2": {"data": 2, "sharding": "full", "pipeline": 2},
    "PP 1F1B x ZeRO-1": {"data": 2, "sharding": "zero1", "pipeline": 2},
    "PP x TP": {"data": 1, "sharding": "none", "pipeline": 2, "tensor": 2},
    "PP x CP": {"data": 1, "sharding": "none", "pipeline": 2, "context": 2},
    "PP interleaved x FSDP2": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "interleaved",
        "chunks": 2,
    },
    "PP zero-bubble": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "zero-bubble",
        "chunks": 2,
    },
    "PP DualPipeV": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "dualpipe-v",
        "chunks": 2,
    },
}


EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 4 x DDP": {"data": 4, "sharding": "none", "expert": 4},
    "EP 2 x FSDP2": {"data": 4, "sharding": "full", "expert": 2},
    "EP x TP": {"data": 2, "sharding": "none", "tensor": 2, "expert": 2},
    "EP x CP": {"data": 2, "sharding": "full", "context": 2, "expert": 2},
    "EP x PP": {"data": 2, "sharding": "full", "pipeline": 2, "expert": 2},
}
"""Of models with routed experts."""


def documents_of(tokens_BT: Tensor, targets_BS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of packed samples, each a micro-batch of its own."""
    for sample in range(GLOBAL_BATCH):
        for start, stop in pairwise((0, *ENDS[sample % len(ENDS)])):
            if stop > start:
                own = slice(sample, sample + 1), slice(start, stop)
                yield tokens_BT[own], targets_BS[own]


def make_model(name: str) -> nn.Module:
    """The whole model, the same weights wherever it is called, in float32."""
    torch.manual_seed(0)
    if name.endswith("adapters"):
        *base, kind = name.removesuffix("adapters").split() or ["lora"]
        return _with_adapters(make_model(" ".join(base) or "built-in"), kind)
    if name == "wide":
        return Decoder(replace(SHAPE, hidden=128, head_dim=32, ffn=256), SEQ_LEN)
    return Decoder(SHAPE, SEQ_LEN) if name == "built-in" else build_hf(CONFIGS[name])


def _with_adapters(model: nn.Module, kind: str) -> nn.Module:
    """Beside every linear of the blocks, as after some steps: with nothing at zero."""
    blocks = model.get_submodule("blocks" if isinstance(model, Decoder) else "transformer.h")
    linears = {
        linear_name(name): module
        for name, module in blocks[0].named_modules()  # type: ignore[index]
        if type(module).__name__ in LINEARS
    }
    num = sum(4 * sum(each.get_parameter("weight").shape) for each in linears.values())
    num += sum(map(out_features, linears.values())) if kind == "dora" else 0
    asked = Adaptation(
        targets=tuple(linears),
        rank=4,
        scale=2.0,
        dropout=0.0,
        frozen_type="float32",
        num_parameters=num * len(blocks),  # type: ignore[arg-type]
        has_magnitudes=kind == "dora",
        num_quantised=0 if kind != "qlora" else num_in_blocks(model),
        seed=7,
    )
    add_adapters(model, asked)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.1)
    return model


def num_in_blocks(model: nn.Module) -> int:
    """Values of all matrices in the blocks of a built-in decoder."""
    blocks = model.get_submodule("blocks")
    return sum(each.numel() for each in blocks.parameters() if each.dim() == 2)


def layout_of(fields: dict[str, Any], variant: dict[str, Any]) -> Layout:
    """Four ranks and eight samples a step, however they are spread."""
    micro_batch = 1 if fields.get("pipeline", 1) > 1 else 2
    layout = Layout(**{"micro_batch": micro_batch, "accumulation": 1, **fields, **variant})
    return replace(layout, accumulation=GLOBAL_BATCH // layout.data // layout.micro_batch)


def alone_layout() -> Layout:
    """One rank, and its batch at once."""
    return Layout(data=1, sharding="none", micro_batch=GLOBAL_BATCH, accumulation=1)


@contextmanager
def all_in(dtype: torch.dtype) -> Iterator[None]:
    """In float64, also what transformers' models compute in float32 whatever their type: norms and
    routers. Their rounding, 6e-8, would hide everything smaller."""
    if dtype is not torch.float64:
        yield
        return
    before = Tensor.to, Tensor.float, F.softmax
    compute_in_float64()
    try:
        yield
    finally:
        Tensor.to, Tensor.float, F.softmax = before  # type: ignore[method-assign, assignment]


class Trainer:
    """A model in a layout, trained by SGD with momentum, which keeps differences as they are; AdamW
    would blow up those of gradients near zero."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        dtype: torch.dtype,
        packed: Packed = "no",
        options: strategy.Options | None = None,
    ) -> None:
        self.layout, self.packed = layout, packed
        self.meshes = strategy.make_meshes(layout, "cpu")
        whole = make_model(model).to(dtype)
        options = options or strategy.Options()
        self.model = strategy.apply(whole, layout, self.meshes, precision="fp32", options=options)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, number: int) -> None:
        """A third of the targets are missing, a different share in every micro-batch."""
        layout = self.layout
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, SHAPE.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = strategy.IGNORED
        slots = rank_slots(layout, self.meshes.place.data)
        batches: list[Any]
        batches = [(tokens[s.start : s.stop, :-1], targets[s.start : s.stop]) for s in slots]
        uneven = None
        if self.packed == "packed":
            ends = torch.tensor([ENDS[slot % len(ENDS)] for slot in range(GLOBAL_BATCH)])
            batches = [(*b, ends[s.start : s.stop]) for b, s in zip(batches, slots, strict=True)]
        if self.packed == "apart":
            batches = list(documents_of(tokens, targets))
            uneven = strategy.Uneven(num_micro_batches=len(batches), num_targets=100.0)
        seen = strategy.forward_backward(
            self.model, self.meshes, batches, precision="fp32", uneven=uneven
        )
        total = torch.stack([seen.loss_sum, seen.num_targets])
        dist.all_reduce(total)
        mean = seen.expected_targets / float(total[1])
        norm = float(strategy.gradient_norm(self.model, self.meshes)) * mean
        strategy.scale_gradients(self.model, mean * strategy.clip_factor(norm, 0.8))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(total[0] / total[1]))
        self.norms.append(norm)

    def result(self) -> dict[str, Any]:
        """Losses, norms, and the pieces of the model that this rank has. Collective."""
        places = parameter_places(self.model)
        state = {}
        for name, value in named_parameters(self.model).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            place = places[name]
            array = whole.detach().numpy().copy()
            state[place.name, place.offset] = (place.size, array)
        return {"losses": self.losses, "norms": self.norms, "state": state}


def train(
    layout: Layout,
    model: str = "built-in",
    dtype: torch.dtype = torch.float64,
    *,
    resume_in: Path | None = None,
    packed: Packed = "no",
    options: strategy.Options | None = None,
) -> dict[str, Any]:
    """Three steps. Collective.

    Args:
        layout: How.
        model: One of `MODELS`.
        dtype: Of everything.
        resume_in: A folder that all ranks see: save there after step 2, and make step 3 with a
            fresh model and optimizer that were loaded from it.
        packed: Whether samples are documents that do not see each other, packed or on one rank one
            after the other.
        options: What `apply` is given.
    """
    with all_in(dtype):
        return _train(resume_in, layout, model, dtype, packed, options)


def _train(resume_in: Path | None, layout: Layout, *given: Any) -> dict[str, Any]:
    trainer = Trainer(layout, *given)
    for number in range(STEPS):
        if resume_in is not None and number == STEPS - 1:
            keeper = Checkpointer(resume_in, CheckpointSpec())
            keeper.save(number, trainer.model, trainer.optimizer, layout=layout.name)
            fresh = Trainer(layout, *given)
            with torch.no_grad():
                for parameter in fresh.model.parameters():
                    parameter.add_(1.0)  # not what was drawn: all of it has to be loaded
            restored = Checkpointer(resume_in, CheckpointSpec()).restore_newest(
                fresh.model, fresh.optimizer
            )
            assert restored.step == number
            fresh.losses, fresh.norms = trainer.losses, trainer.norms
            trainer = fresh
        trainer.step(number)
    return trainer.result()


def deviation(seen: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """Largest relative difference of any loss, norm or parameter of any rank."""
    pairs = [(each[key], alone[key]) for each in seen for key in ("losses", "norms")]
    want = whole_state([alone])
    found = whole_state(seen)
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    pairs += [(found[name], value) for name, value in want.items()]
    return max(relative(a, b) for a, b in pairs)


def loss_deviation(seen: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """The same of the losses alone."""
    return max(relative(each["losses"], alone["losses"]) for each in seen)


def relative(a: Any, b: Any) -> float:
    """Largest difference over the largest number; infinite where one is not finite."""
    if np.array_equal(a, b):  # a frozen bias may be all zeros
        return 0.0
    found = float(np.abs(np.subtract(a, b)).max() / np.abs(np.asarray(b)).max())
    return found if np.isfinite(found) else float("inf")


def whole_state(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Every parameter of the plain model, from the pieces of all ranks; NaN where none has it."""
    whole: dict[str, Any] = {}
    for rank in ranks:
        for (name, offset), (size, array) in rank["state"].items():
            missing = np.nan if array.dtype.kind == "f" else 0  # bytes of NF4 among them
            target = whole.setdefault(name, np.full(size, missing, dtype=array.dtype))
            place = tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))
            target[place] = array
    return whole

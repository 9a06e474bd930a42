"""The counts of the built-in decoder, held to the real module by measuring what autograd saves."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from paceline.choices import Recompute
from paceline.profile import (
    ComputeMode,
    DecoderShape,
    outside_bytes,
    profile_decoder,
    runtime_kernels,
)
from paceline.profile.saved import saved_bytes, saved_input, saved_outputs

torch = pytest.importorskip("torch")

SHAPES = {
    "grouped queries": DecoderShape(
        layers=3,
        hidden=64,
        heads=8,
        kv_heads=2,
        head_dim=8,
        ffn=176,
        vocab=640,
        tied_embeddings=False,
    ),
    "tied, with bias": DecoderShape(
        layers=2,
        hidden=96,
        heads=4,
        kv_heads=4,
        head_dim=24,
        ffn=256,
        vocab=320,
        tied_embeddings=True,
        qkv_bias=True,
    ),
    "wide heads": DecoderShape(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=1,
        head_dim=64,
        ffn=352,
        vocab=256,
        tied_embeddings=False,
    ),
}
TOLERANCE = 0.05
BATCH, SEQ_LEN = 3, 40
KEEPS: dict[Recompute, Callable[..., Any]] = {
    "none": saved_bytes,
    "selective": saved_outputs,
    "full": lambda block, kernels, _: saved_input(block, kernels),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_equal_the_real_modules(name: str):
    from paceline.runtime.decoder import Decoder

    shape = SHAPES[name]
    model = Decoder(shape, SEQ_LEN)
    profile = profile_decoder(shape, SEQ_LEN)
    assert profile.num_parameters == sum(p.numel() for p in model.parameters())
    (block,) = {sum(p.numel() for p in block.parameters()) for block in model.blocks}
    assert profile.num_block_parameters == block


def predicted_bytes(shape: DecoderShape, mode: ComputeMode, recompute: Recompute = "none") -> float:
    """The same from the counts: every block, then the head and the loss."""
    kernels = runtime_kernels(mode, fused_norm=False)
    (block,) = profile_decoder(shape, SEQ_LEN).blocks
    inside = KEEPS[recompute](block, kernels, SEQ_LEN)
    outside = outside_bytes(shape.hidden, shape.vocab, kernels)
    a_token = shape.layers * (inside.tensor + inside.sequence) + outside.kept + outside.logits
    return BATCH * SEQ_LEN * a_token


@pytest.mark.parametrize("mode", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize("name", SHAPES)
def test_saved_activations_are_within_5_percent_of_the_real_modules(name: str, mode: ComputeMode):
    shape = SHAPES[name]
    predicted = predicted_bytes(shape, mode)
    assert measured_bytes(shape, mode) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_activations_of_sharded_bf16_are_within_5_percent(name: str):
    """FSDP2 frees gathered parameters by resizing their storage, which a hook cannot follow, so a
    module in bfloat16 stands for it: the parameters are what FSDP2 hands it."""
    shape = SHAPES[name]
    predicted = predicted_bytes(shape, "bf16-sharded")
    assert measured_bytes(shape, "bf16-sharded") == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("mode", ["fp32", "bf16-autocast", "bf16-sharded"])
@pytest.mark.parametrize("name", SHAPES)
def test_recomputed_blocks_keep_what_is_predicted_within_5_percent(
    name: str, mode: ComputeMode, recompute: Recompute
):
    shape = SHAPES[name]
    predicted = predicted_bytes(shape, mode, recompute)
    assert measured_bytes(shape, mode, recompute) == pytest.approx(predicted, rel=TOLERANCE)


def measured_bytes(shape: DecoderShape, mode: ComputeMode, recompute: Recompute = "none") -> int:
    """Bytes of all storages that autograd saves, without parameters, their casts and tables."""
    import torch.nn.functional as F

    from paceline.runtime.decoder import Decoder

    model = Decoder(shape, SEQ_LEN)
    if mode == "bf16-sharded":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    held = (*model.parameters(), *model.buffers())
    pointers = {tensor.untyped_storage().data_ptr() for tensor in held}
    casts = {tuple(p.shape) for p in model.parameters()}
    casts |= {shape_[::-1] for shape_ in casts}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = mode == "bf16-autocast" and (
            tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in casts
        )
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in pointers and not is_cast:
            found[pointer] = tensor
        return tensor

    _recompute_blocks(model, recompute, pack)
    ids = torch.randint(0, shape.vocab, (BATCH, SEQ_LEN))
    targets = torch.randint(0, shape.vocab, (BATCH, SEQ_LEN))
    context = torch.autocast("cpu", torch.bfloat16) if mode == "bf16-autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").mean()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _recompute_blocks(model: Any, recompute: Recompute, pack: Callable[[Any], Any]) -> None:
    """Checkpoint every block; what a selective policy keeps goes to `pack` as well."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
        noop_context_fn,
    )

    ops = torch.ops.aten
    kept = (ops.mm.default, ops.addmm.default, ops._scaled_dot_product_flash_attention_for_cpu)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in kept and getattr(op, "overloadpacket", None) not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        outputs = context.op_output
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            pack(output)
        return CheckpointPolicy.MUST_SAVE

    if recompute == "none":
        return
    contexts = noop_context_fn
    if recompute == "selective":
        contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)

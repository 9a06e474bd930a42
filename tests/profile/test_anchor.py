"""The counts of the built-in decoder, held to the real module by measuring what autograd saves."""

from contextlib import nullcontext

import pytest

from paceline.profile import ComputeMode, DecoderShape, profile_decoder

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


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_equal_the_real_modules(name: str):
    from paceline.runtime.decoder import Decoder

    shape = SHAPES[name]
    model = Decoder(shape, SEQ_LEN)
    profile = profile_decoder(shape, SEQ_LEN)
    assert profile.num_parameters == sum(p.numel() for p in model.parameters())
    (block,) = {sum(p.numel() for p in block.parameters()) for block in model.blocks}
    assert profile.num_block_parameters == block


@pytest.mark.parametrize("mode", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize("name", SHAPES)
def test_saved_activations_are_within_5_percent_of_the_real_modules(name: str, mode: ComputeMode):
    shape = SHAPES[name]
    activations = profile_decoder(shape, SEQ_LEN).activation_bytes
    assert activations is not None
    saved = activations[mode]
    predicted = BATCH * (shape.layers * saved.block + saved.outside)
    assert measured_bytes(shape, mode) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_activations_of_sharded_bf16_are_within_5_percent(name: str):
    """FSDP2 frees gathered parameters by resizing their storage, which a hook cannot follow, so a
    module in bfloat16 stands for it: the parameters are what FSDP2 hands it."""
    shape = SHAPES[name]
    activations = profile_decoder(shape, SEQ_LEN).activation_bytes
    assert activations is not None
    saved = activations["bf16-sharded"]
    predicted = BATCH * (shape.layers * saved.block + saved.outside)
    assert measured_bytes(shape, "bf16-sharded") == pytest.approx(predicted, rel=TOLERANCE)


def measured_bytes(shape: DecoderShape, mode: ComputeMode) -> int:
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

    ids = torch.randint(0, shape.vocab, (BATCH, SEQ_LEN))
    targets = torch.randint(0, shape.vocab, (BATCH, SEQ_LEN))
    context = torch.autocast("cpu", torch.bfloat16) if mode == "bf16-autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").mean()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

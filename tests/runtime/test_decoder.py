import dataclasses
import math

import pytest
import torch
from tests.runtime.tiny import SEQ_LEN, SHAPE

from paceline.runtime.decoder import Decoder, Rotary
from paceline.runtime.strategy.pipeline.stages import Skip


def make(**changes):
    torch.manual_seed(0)
    return Decoder(dataclasses.replace(SHAPE, **changes), SEQ_LEN)


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE.vocab, (2, SEQ_LEN), generator=generator)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_decoder_has_exactly_the_parameters_of_its_shape(tied, bias):
    model = make(tied_embeddings=tied, qkv_bias=bias)
    hidden, ffn, vocab, query, kv = 32, 64, 64, 4 * 8, 2 * 8
    attention = 2 * hidden * query + 2 * hidden * kv + (query + 2 * kv if bias else 0)
    block = attention + 3 * hidden * ffn + 2 * hidden
    expected = 2 * block + hidden + (1 if tied else 2) * vocab * hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_a_later_token_changes_no_earlier_logits():
    model, first = make(), tokens()
    second = first.clone()
    second[:, 9] = (second[:, 9] + 1) % SHAPE.vocab
    before, after = model(first), model(second)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_start_loss_is_that_of_a_uniform_guess():
    logits = make()(tokens())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(2).flatten())
    assert loss.item() == pytest.approx(math.log(64), abs=0.05)


def test_rotated_heads_see_distance_and_not_position():
    rotary = Rotary(32, 8, 10_000.0)
    rotary.reset_parameters()
    query, key = torch.randn(8), torch.randn(8)
    same = torch.stack([query] * 32).view(1, 1, 32, 8), torch.stack([key] * 32).view(1, 1, 32, 8)
    scores = (rotary.rotate(same[0]) @ rotary.rotate(same[1]).transpose(-1, -2))[0, 0]
    for distance in (0, 3, 11):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)


def test_shared_key_heads_equal_repeated_ones():
    shared = make()
    whole = make(kv_heads=4)
    state = shared.state_dict()
    for name, value in state.items():
        if "attention.key" in name or "attention.value" in name:
            state[name] = value.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    whole.load_state_dict(state)
    assert torch.allclose(shared(tokens()), whole(tokens()), atol=1e-6)


def test_a_decoder_built_on_meta_can_be_filled_later():
    with torch.device("meta"):
        model = Decoder(SHAPE, SEQ_LEN)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.reset_parameters()
    other = make()
    torch.manual_seed(5)
    other.reset_parameters()
    assert torch.equal(model(tokens()), other(tokens()))
    assert model.output.weight is model.embedding.weight


@pytest.mark.parametrize("end", ["embedding", "output", None])
def test_a_tied_decoder_with_one_end_or_none_is_reset_as_a_pipeline_stage(end):
    decoder = make(tied_embeddings=True)
    for other in {"embedding", "output"} - {end}:
        setattr(decoder, other, Skip())
    decoder.reset_parameters()
    assert hasattr(decoder.embedding, "weight") == (end == "embedding")
    assert hasattr(decoder.output, "weight") == (end == "output")


def test_rotary_tables_stay_float32_when_activations_are_bf16():
    model = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    assert model.rotary.cos_SD.dtype == torch.float32
    assert model.rotary.rotate(torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16

"""One flipped bit changes a fingerprint, whichever it is."""

import random
from collections.abc import Callable

import pytest
import torch
from tests.runtime.tiny import SHAPE, build, fake_rank, layout_of
from torch import Tensor

from paceline.runtime.recovery.fingerprint import fingerprint, sums_of_words
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.state import Stored, boxes_of, named_state

WORDS = pytest.mark.parametrize(
    "of", [sums_of_words, lambda t: fingerprint(iter([("", t)])).whole()]
)
Of = Callable[[Tensor], Tensor]


def xxh3(tensor: Tensor) -> Tensor:
    return fingerprint(iter([("", tensor)])).whole()


WORDS = pytest.mark.parametrize("of", [sums_of_words, xxh3])


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a tensor's memory, counted from its first element's lowest byte."""
    words = tensor.detach().view(-1).view(torch.uint8)
    words[bit // 8] ^= 1 << bit % 8


@WORDS
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool]
)
@pytest.mark.parametrize("size", [1, 3, 255, 4096, 8192 + 5])
def test_any_one_bit_changes_it_and_flipped_back_restores_it(of: Of, dtype: torch.dtype, size: int):
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    before, draw = of(tensor), random.Random(size)
    num_bits = tensor.nbytes * 8
    bits = range(num_bits) if num_bits < 300 else [draw.randrange(num_bits) for _ in range(100)]
    for bit in bits:
        flip(tensor, bit)
        assert of(tensor) != before, bit
        flip(tensor, bit)
        assert of(tensor) == before


@WORDS
def test_the_top_bit_of_the_last_word_counts(of: Of):
    tensor = torch.zeros(3 * 4096)
    before = of(tensor)
    flip(tensor, tensor.nbytes * 8 - 1)
    assert of(tensor) != before  # -0.0 == 0.0, but its bits differ


@WORDS
def test_two_numbers_that_change_places_change_it(of: Of):
    torch.manual_seed(1)
    tensor = torch.randn(5 * 4096 + 100)
    before, draw = of(tensor), random.Random(2)
    for _ in range(200):
        a, b = draw.sample(range(tensor.numel()), 2)
        tensor[[a, b]] = tensor[[b, a]]
        assert of(tensor) != before, (a, b)
        tensor[[a, b]] = tensor[[b, a]]


@WORDS
def test_a_view_that_begins_in_the_middle_of_a_word_is_as_its_copy(of: Of):
    whole = torch.randn(9001).to(torch.bfloat16)
    for start, stop in ((1, 9001), (3, 8000), (2, 9000)):
        view = whole[start:stop]
        before = of(view)
        flip(whole, 16 * start)
        assert of(whole[start:stop]) != before
        flip(whole, 16 * start)
        flip(whole, 16 * start - 1)
        assert of(whole[start:stop]) == before  # outside


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor", "adamw-8bit"])
@pytest.mark.parametrize("sharding", ["none", "full", "zero1"])
def test_a_bit_of_any_tensor_of_a_rank_is_found_and_the_tensor_named(optimizer: str, sharding: str):
    layout = layout_of(2, sharding)
    with fake_rank(layout, 1):
        model, updates = build(layout, optimizer=optimizer)
        state = LiveState(model, updates)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        updates.step()
        tensors = dict(state.tensors())
        named = named_state(model, updates)
        assert state.num_bytes == sum(
            box.tensor.nbytes
            for stored in named.values()
            if isinstance(stored, Stored)
            for box in boxes_of(stored)
        )
        clean, draw = fingerprint(state.tensors()), random.Random(3)
        whole, each = int(clean.whole()), clean.by_name()
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            for _ in range(3):
                bit = draw.randrange(tensor.nbytes * 8)
                flip(tensor, bit)
                found = fingerprint(state.tensors())
                assert int(found.whole()) != whole, name
                assert [n for n, v in found.by_name().items() if v != each[n]] == [name]
                flip(tensor, bit)
        assert int(fingerprint(state.tensors()).whole()) == whole
    assert len(tensors) >= SHAPE.layers * 7

"""The loss without all logits: equal to the whole one, on one device and in every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.runtime.equality import (
    LAYOUTS,
    SEQ_LEN,
    SHAPE,
    alone_layout,
    deviation,
    layout_of,
    make_model,
    train,
)
from tests.runtime.tensor_models import tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import PlanError
from paceline.plan.loss import PLAIN_HEADS
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import as_plain_model
from paceline.runtime.strategy import next_token_loss, ways_of
from paceline.runtime.strategy.chunked import IGNORED, chunked_loss, defer_head, in_chunks

T, H, V = 37, 16, 50


def problem(
    dtype: torch.dtype, *, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    shift = torch.randn(V, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[::5] = IGNORED
    return hidden, weight, shift, targets


def whole_loss(hidden: Tensor, weight: Tensor, shift: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, shift)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_give_the_whole_loss_and_its_gradients(
    chunk: int, bias: bool, dtype: torch.dtype, most: float
) -> None:
    hidden, weight, shift, targets = problem(dtype, bias=bias)
    leaves = [each for each in (hidden, weight, shift) if each is not None]
    want = whole_loss(hidden, weight, shift, targets)
    wanted = torch.autograd.grad(want * 0.25, leaves)
    loss = chunked_loss(hidden, weight, targets, chunk, bias_V=shift)
    found = torch.autograd.grad(loss * 0.25, leaves)
    assert loss.dtype == dtype
    for a, b in zip((loss, *found), (want, *wanted), strict=True):
        assert (a - b).detach().norm() < most * b.detach().norm()


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_loss_of_bfloat16_products_is_in_float32(autocasts: bool) -> None:
    hidden, weight, _, targets = problem(torch.float32 if autocasts else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        loss = chunked_loss(hidden, weight, targets, 8)
        want = whole_loss(hidden, weight, None, targets)
    assert loss.dtype == torch.float32
    assert float((loss - want).detach().abs() / want.detach()) < 1e-4
    (gradient,) = torch.autograd.grad(loss, weight)
    (wanted,) = torch.autograd.grad(want, weight)
    assert gradient.dtype == weight.dtype
    assert float((gradient - wanted).float().norm() / wanted.float().norm()) < 2e-2


def test_a_frozen_head_gets_no_gradient_and_no_target_costs_none() -> None:
    hidden, weight, _, targets = problem(torch.float64)
    weight.requires_grad_(False)
    chunked_loss(hidden, weight, targets, 8).backward()
    assert weight.grad is None
    (wanted,) = torch.autograd.grad(whole_loss(hidden, weight, None, targets), hidden)
    torch.testing.assert_close(hidden.grad, wanted)
    hidden.grad = None
    loss = chunked_loss(hidden, weight, torch.full((T,), IGNORED), 8)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_large_loss_scale_does_not_overflow_in_float16() -> None:
    hidden, weight, _, targets = problem(torch.float16)
    loss = chunked_loss(hidden, weight, targets, 8)
    (loss * (2.0**20 / 2.0**18)).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_without_gradients_none_are_made() -> None:
    hidden, weight, _, targets = problem(torch.float64)
    with torch.no_grad():
        loss = chunked_loss(hidden, weight, targets, 8)
    assert not loss.requires_grad
    assert float((loss - whole_loss(hidden, weight, None, targets)).detach().abs()) < 1e-10


class Scaled(Decoder):
    """A decoder that does something to its logits."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return super().forward(tokens_BS) * 0.5


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = Scaled(SHAPE, SEQ_LEN)
    defer_head(model, ways_of(Decoder(SHAPE, SEQ_LEN)), 8)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    assert model(tokens).shape == (1, SEQ_LEN, SHAPE.vocab)
    with in_chunks(model), pytest.raises(PlanError, match="not what its head gives"):
        model(tokens)


@pytest.mark.parametrize("kind", ["own", *PLAIN_HEADS])
def test_what_a_model_returns_is_what_its_head_gives(kind: str) -> None:
    """In float32, where a head's input is not cast on its way out."""
    model = tiny(kind).float()
    model = model if kind == "own" else as_plain_model(model)
    defer_head(model, ways_of(model), 8)
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        logits = model(tokens)
        want, num = next_token_loss(logits, tokens)
        with in_chunks(model) as loss_of:
            assert loss_of is not None
            loss, same = loss_of(model(tokens), tokens)
    assert num == same
    torch.testing.assert_close(loss, want)


def test_a_model_whose_head_nobody_knows_is_refused() -> None:
    with pytest.raises(PlanError, match="is not known"):
        defer_head(nn.Linear(2, 2), None, 8)


QUICK = (("built-in", "TP x FSDP2"), ("gpt2", "PP 1F1B x FSDP2"))
"""GPT-2's embedding is tied to its head."""

MORE = (
    *(("built-in", name) for name in ("HSDP", "CP ring x FSDP2", "PP 1F1B x FSDP2")),
    *(("gpt2", name) for name in ("DDP", "FSDP2", "TP without SP", "PP 1F1B x DDP")),
)


def evaluate_in(name: str, chunk: int) -> float:
    """A evaluation loss, after which the parameters are sharded again."""
    layout = layout_of(LAYOUTS[name], {})
    meshes = strategy.make_meshes(layout, "cpu")
    options = strategy.Options(loss_chunk=chunk)
    model = strategy.apply(make_model("gpt2"), layout, meshes, precision="fp32", options=options)
    tokens = torch.arange(4 * SEQ_LEN).view(4, SEQ_LEN) % SHAPE.vocab
    batches = [(each[None], each[None]) for each in tokens]
    seen = strategy.evaluate(model, meshes, batches, precision="fp32")
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return float(seen.loss_sum)


def train_in(rank: int, world: int, cells: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    if cells == QUICK:
        assert evaluate_in("FSDP2", 5) == pytest.approx(evaluate_in("FSDP2", 0), rel=1e-6)
    chunks = strategy.Options(loss_chunk=5)
    return {
        f"{model}, {name}": train(layout_of(LAYOUTS[name], {}), model, options=chunks)
        for model, name in cells
    }


def train_alone(rank: int, world: int) -> dict[str, Any]:
    return {name: train(alone_layout(), name) for name in ("built-in", "gpt2")}


@pytest.mark.ranks
@pytest.mark.parametrize("cells", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)])
def test_each_layout_trains_in_chunks_as_one_device_does_with_all_logits(
    cells: tuple[tuple[str, str], ...],
) -> None:
    alone = run_ranks(train_alone, 1)[0]
    ranks = run_ranks(train_in, 4, cells)
    found = {
        name: deviation([rank[name] for rank in ranks], alone[name.partition(",")[0]])
        for name in ranks[0]
    }
    assert not {name: each for name, each in found.items() if each > 1e-12}

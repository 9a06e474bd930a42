"""Pipelines of every schedule against the whole model on one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import run_ranks
from torch import Tensor, nn

from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime.decoder import Decoder
from paceline.runtime.strategy.mesh import make_meshes
from paceline.runtime.strategy.pipeline import (
    Pipeline,
    evaluate,
    forward_backward,
    split_stages,
)
from paceline.runtime.strategy.ways import Ways

SHAPE = DecoderShape(
    layers=5,
    hidden=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn=24,
    vocab=32,
    tied_embeddings=False,
)
SEQ_LEN, SAMPLES = 6, 2
DECODER = Ways(blocks="blocks", first=("embedding",), last=("norm", "output"))


def layout_of(pipeline: int, schedule: str, accumulation: int, **others: Any) -> Layout:
    others = {"data": 1, "sharding": "none", "micro_batch": SAMPLES} | others
    return Layout(pipeline=pipeline, schedule=schedule, accumulation=accumulation, **others)


def decoder(layers: int, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    shape = replace(SHAPE, layers=layers, tied_embeddings=tied)
    return Decoder(shape, SEQ_LEN).double()


def micro_batches(count: int, data: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(data)
    shape = (count, SAMPLES, SEQ_LEN + 1)
    tokens = torch.randint(0, SHAPE.vocab, shape, generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def whole(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Sum of the losses and gradients of a model on one device."""
    total = 0.0
    for inputs, targets in batches:
        loss, _ = loss_of(model(inputs), targets)
        (loss * scale).backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(pipeline: Pipeline, expected: dict[str, Tensor]) -> float:
    """Largest deviation of a gradient on this rank, relative to the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    found = 0.0
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        found = max(found, float((gradient - expected[name]).abs().max()))
    return found / largest


def run_one(rank: int, world: int, layout: Layout, layers: int, tied: bool) -> dict[str, Any]:
    meshes = make_meshes(layout, "cpu")
    scale = 1 / 7
    batches = micro_batches(layout.accumulation)
    loss, expected = whole(decoder(layers, tied=tied), batches, scale)
    pipeline = split_stages(decoder(layers, tied=tied), layout, meshes, DECODER)
    loss_sum, num = forward_backward(pipeline, batches, loss_of, loss_scale=scale)
    eval_sum, _ = evaluate(pipeline, batches[:3], loss_of)
    other = {name: None for name in expected}
    names = {name for name, _ in pipeline.named_parameters()}
    assert names <= set(other)
    first = worst(pipeline, expected)
    for parameter in pipeline.parameters():
        parameter.grad = None
    forward_backward(pipeline, batches, loss_of, loss_scale=scale)
    return {
        "loss": float(loss_sum),
        "evaluated": float(eval_sum),
        "expected": loss,
        "num": int(num),
        "worst": first,
        "again": worst(pipeline, expected),
        "names": names,
    }


CASES = {
    "gpipe": (layout_of(2, "gpipe", 3), 5),
    "1f1b": (layout_of(2, "1f1b", 5), 5),
    "interleaved": (layout_of(2, "interleaved", 4, chunks=2), 5),
    "zero-bubble": (layout_of(2, "zero-bubble", 4), 5),
    "zero-bubble v": (layout_of(2, "zero-bubble", 3, chunks=2), 5),
    "zero-bubble loop": (layout_of(2, "zero-bubble", 4, chunks=3), 7),
    "dualpipe-v": (layout_of(2, "dualpipe-v", 5), 5),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("word", CASES)
def test_a_pipeline_on_two_ranks_gives_the_whole_models_loss_and_gradients(word: str, tied: bool):
    layout, layers = CASES[word]
    results = run_ranks(run_one, 2, layout, layers, tied)
    print(word, tied, results)
    assert sum(each["num"] for each in results) == layout.accumulation * SAMPLES * SEQ_LEN
    assert sum(each["loss"] for each in results) == pytest.approx(results[0]["expected"], rel=1e-14)
    assert max(each["worst"] for each in results) < 1e-12

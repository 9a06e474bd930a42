"""Adapters of every kind in every layout: what `plan` accepts, `run` builds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.tiny import fake_rank
from torch import nn

from paceline.errors import PacelineError, PlanError
from paceline.job import Job, parse_job
from paceline.plan import plan_job
from paceline.profile import check_runnable
from paceline.runtime import strategy
from paceline.runtime.models import make_model

KINDS = ("lora", "dora", "qlora")
LAYOUTS = {
    "DDP": "{sharding: none, tensor: 1, pipeline: 1}",
    "ZeRO-1": "{sharding: zero1, tensor: 1, pipeline: 1}",
    "ZeRO-2": "{sharding: zero2, tensor: 1, pipeline: 1}",
    "FSDP2": "{sharding: full, tensor: 1, pipeline: 1}",
    "HSDP": "{sharding: hybrid, tensor: 1, pipeline: 1, shard: 2}",
    "TP 2": "{sharding: full, tensor: 2, pipeline: 1}",
    "TP 4": "{sharding: none, tensor: 4, pipeline: 1}",
    "PP": "{sharding: full, tensor: 1, pipeline: 2}",
    "CP": "{sharding: full, tensor: 1, pipeline: 1, context: 2}",
}
MODELS = {
    "built-in": "decoder: {layers: 4, hidden: 256, heads: 4, vocab: 256, ffn: 512}",
    "thin": "decoder: {layers: 4, hidden: 128, heads: 4, vocab: 256, ffn: 320}",
    "odd": "decoder: {layers: 4, hidden: 96, heads: 4, vocab: 256, ffn: 256}",
    "gpt2": "preset: gpt2",
    "experts": "preset: mixtral-8x7b",
}
NOT_IN_NF4 = {
    *((model, layout) for model in ("odd", "gpt2", "experts") for layout in LAYOUTS),
    ("thin", "TP 2"),  # 320 inputs, 160 a rank
    ("thin", "TP 4"),
}


def asked(model: str, layout: str, kind: str) -> Job:
    text = (
        f"model: {{{MODELS.get(model, model)}}}\ndata: {{path: x, seq_len: 64}}\n"
        f"train: {{global_batch: 8, steps: 2, adapter: {{kind: {kind}, rank: 4}}}}\n"
        f"cluster: {{accelerator: H100-SXM, per_node: 4}}\nlayout: {LAYOUTS.get(layout, layout)}\n"
    )
    return parse_job(text, source="job.yaml", folder=Path("/nowhere"))


def refusal(job: Job) -> PacelineError | None:
    """Why `run` does not begin, before any rank starts."""
    try:
        plan_job(job)
        PlanError.raise_for(list(check_runnable(job)))
    except PacelineError as error:
        return error
    return None


@pytest.mark.parametrize("layout", ["FSDP2", "TP 2", "TP 4"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_refused_is_refused_before_any_rank_starts(model: str, layout: str):
    for kind in ("dora", "qlora"):
        found = refusal(asked(model, layout, kind))
        is_expected = kind == "qlora" and (model, layout) in NOT_IN_NF4
        assert (found is not None) == is_expected, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_planned_is_built(layout: str, kind: str):
    job = asked("built-in", layout, kind)
    plan = plan_job(job)
    with fake_rank(plan.layout, 0):
        model = make_model(job, plan.decoder, plan.precision)()
        meshes = strategy.make_meshes(plan.layout, "cpu")
        made = strategy.apply(model, plan.layout, meshes, precision=plan.precision, sends=False)
    trained = [each for each in made.parameters() if each.requires_grad]
    types = {each.dtype for each in made.parameters() if not each.requires_grad}
    assert trained
    assert (torch.uint8 in types) == (kind == "qlora")


ORDERS = {
    "1f1b": "tensor: 2, pipeline: 2, schedule: 1f1b",
    "interleaved": "tensor: 2, pipeline: 2, schedule: interleaved, chunks: 2",
    "zero-bubble": "tensor: 1, pipeline: 4, schedule: zero-bubble",
    "dualpipe-v": "tensor: 1, pipeline: 2, schedule: dualpipe-v",
}
SMALL = "decoder: {layers: 4, hidden: 128, heads: 4, vocab: 16384, ffn: 256}"
"""Its head takes the time of several blocks, and would be a stage of its own."""


def cut(job: Job, rank: int, freeze: Callable[[nn.Module], object] = id) -> nn.Module:
    """What a rank of the planned layout holds, without memory."""
    plan = plan_job(job)
    with fake_rank(plan.layout, rank), torch.device("meta"):
        model = make_model(job, plan.decoder, plan.precision)()
        freeze(model)
        meshes = strategy.make_meshes(plan.layout, "cpu")
        return strategy.apply(model, plan.layout, meshes, precision=plan.precision, sends=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_each_rank_of_a_pipeline_has_adapters_to_train(order: str, kind: str):
    text = f"{{{ORDERS[order]}, sharding: none}}"
    job = asked(SMALL, text, kind)
    layout = plan_job(job).layout
    for rank in range(0, layout.num_ranks, layout.num_ranks // layout.pipeline):
        assert any(each.requires_grad for each in cut(job, rank).parameters()), rank


@pytest.mark.filterwarnings("ignore")
def test_a_rank_with_frozen_blocks_alone_is_refused_on_every_rank():
    job = asked(SMALL, "{pipeline: 2, tensor: 1, sharding: none}", "lora")

    def freeze(model: nn.Module) -> None:
        model.get_submodule("blocks.0").requires_grad_(True)
        for name in ("1", "2", "3"):
            model.get_submodule(f"blocks.{name}").requires_grad_(False)

    for rank in (0, 2):
        with pytest.raises(PlanError, match=r"L030: 1 of 2 pipeline ranks would have nothing"):
            cut(job, rank, freeze)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["TP 2", "TP 4"])
def test_a_rank_would_refuse_it_as_well(layout: str):
    """By the sizes of the model, where your own program has planned nothing."""
    job = asked("thin", layout, "qlora")
    planned = plan_job(asked("thin", layout, "lora"))
    with fake_rank(planned.layout, 0), torch.device("meta"):
        model = make_model(job, planned.decoder, "bf16")()
        meshes = strategy.make_meshes(planned.layout, "cpu")
        with pytest.raises(PlanError, match="L005"):
            strategy.apply(model, planned.layout, meshes, precision="bf16", sends=False)


def test_restoring_takes_time_that_is_booked():
    steps = [plan_job(asked("built-in", "FSDP2", kind)).estimate for kind in ("lora", "qlora")]
    plain, quantised = (dict(step.terms)["compute"] for step in steps)
    assert quantised > plain

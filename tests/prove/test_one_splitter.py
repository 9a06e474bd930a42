"""What is priced on each stage is what `paceline run` and `prove` put there."""

import pytest
from tests.plan.scene import JOB, cluster_of, job_of

from paceline.catalog.engines import load_engines
from paceline.estimate import case_of
from paceline.estimate.stages import blocks_by_stage
from paceline.parallel import Layout
from paceline.profile import resolve_config, resolve_decoder, resolve_profile
from paceline.prove.model import build
from paceline.prove.proof import ModelRequest
from paceline.runtime.strategy.pipeline.stages import blocks_of
from paceline.runtime.strategy.ways.find import ways_of

MODELS = {
    "a large vocabulary": "{decoder: {layers: 16, hidden: 256, heads: 4, vocab: 32000}}",
    "a byte each": "{decoder: {layers: 17, hidden: 64, heads: 4}}",
    "a tied head": "{decoder: {layers: 12, hidden: 64, heads: 4, vocab: 8000, "
    "tied_embeddings: true}}",
    "gpt2": "{hf_config: gpt2}",
    "experts": "{hf_config: mixtral-8x7b}",
}
LAYOUTS = {
    "1f1b over 4": ("1f1b", 4, 1),
    "1f1b over 3": ("1f1b", 3, 1),
    "interleaved over 2": ("interleaved", 2, 3),
    "ZB-V over 2": ("zero-bubble", 2, 2),
    "DualPipe-V over 3": ("dualpipe-v", 3, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_runtime_put_the_same_blocks_on_every_stage(name):
    job = job_of(JOB, f"model={MODELS[name]}")
    shape, asked = resolve_decoder(job), resolve_config(job)
    request = ModelRequest(decoder=shape) if shape else ModelRequest(config=dict(asked.config))
    model = build(request, 128)
    case = case_of(resolve_profile(job), cluster_of(job), precision="bf16")
    for schedule, pipeline, chunks in LAYOUTS.values():
        layout = Layout(
            data=1,
            sharding="none",
            micro_batch=1,
            accumulation=8,
            pipeline=pipeline,
            schedule=schedule,
            chunks=chunks,
        )
        assert blocks_by_stage(layout, case) == blocks_of(model, ways_of(model), layout)


def test_an_engine_that_does_not_balance_has_equal_stages_as_far_as_blocks_divide():
    job = job_of(JOB, f"model={MODELS['a byte each']}")
    engine = load_engines()["megatron"]
    assert not engine.balances_stages
    case = case_of(resolve_profile(job), cluster_of(job), precision="bf16", engine=engine)
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=8, pipeline=4)
    assert list(map(len, blocks_by_stage(layout, case))) == [4, 4, 5, 4]

"""What a planned layout, and the model, become at a few ranks."""

from pathlib import Path
from typing import Any

import pytest

from paceline.catalog.configs import load_published_configs
from paceline.check.verify.small import (
    small_case,
    small_config,
    small_decoder,
    small_layout,
    with_overrides,
)
from paceline.errors import JobError
from paceline.job import parse_job
from paceline.parallel.layout import Layout
from paceline.plan import plan_job
from paceline.profile import DecoderShape, profile_config

PLANNED = Layout(
    data=8,
    sharding="full",
    micro_batch=4,
    accumulation=16,
    tensor=8,
    pipeline=4,
    schedule="interleaved",
    chunks=5,
)
JOB = """
model: {decoder: {layers: 6, hidden: 256, heads: 8, kv_heads: 4}}
data: {corpus: python-stdlib, seq_len: 128}
cluster: {per_node: 2, memory: 8GiB}
train: {global_batch: 16, steps: 100}
"""


def test_every_axis_stays_while_it_fits():
    small = small_layout(PLANNED, ranks=8)
    layout = small.layout
    assert (layout.tensor, layout.pipeline, layout.data) == (2, 2, 2)
    assert (layout.sharding, layout.schedule, layout.chunks) == ("full", "interleaved", 2)
    assert not [note for note in small.notes if "not covered" in note]


def test_what_does_not_fit_is_said_with_the_ranks_that_would_do():
    small = small_layout(PLANNED)
    assert (small.layout.tensor, small.layout.pipeline, small.layout.data) == (2, 1, 2)
    assert "not covered with 4 ranks: pipeline 4; --ranks 8 has room" in small.notes


def test_hybrid_sharding_keeps_copies_of_shards():
    planned = Layout(data=64, sharding="hybrid", shard=8, micro_batch=1, accumulation=1)
    layout = small_layout(planned).layout
    assert (layout.data, layout.sharding, layout.shard) == (4, "hybrid", 2)


def test_a_pipeline_has_micro_batches_for_its_schedule():
    planned = Layout(
        data=1,
        sharding="none",
        micro_batch=1,
        accumulation=64,
        pipeline=8,
        schedule="dualpipe-v",
    )
    assert small_layout(planned).layout.accumulation == 8


@pytest.mark.parametrize("context_kind", ["ring", "ulysses"])
def test_a_small_decoder_is_divisible_by_what_splits_it(context_kind: Any):
    llama = DecoderShape(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128256,
        tied_embeddings=False,
    )
    layout = Layout(
        data=1,
        sharding="none",
        micro_batch=1,
        accumulation=8,
        tensor=2,
        context=2,
        context_kind=context_kind,
        pipeline=2,
        schedule="interleaved",
        chunks=2,
    )
    small = small_decoder(llama, layout)
    assert small.layers == 4
    assert small.heads % 4 == 0
    assert small.kv_heads % 2 == 0
    assert small.heads // small.kv_heads == 4
    assert small.ffn % 2 == small.vocab % 2 == 0
    assert small.hidden <= 16 * small.heads


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-2b", "pythia-70m", "opt-1.3b"]
)
def test_a_small_config_is_still_one_of_its_family(name: str):
    config = load_published_configs()[name].config
    layout = Layout(data=2, sharding="full", micro_batch=1, accumulation=2, tensor=2)
    small = small_config(config, layout)
    before, after = profile_config(config, 64), profile_config(small, 64)
    assert small["model_type"] == config["model_type"]
    assert after.num_parameters < 2_000_000 < before.num_parameters
    assert [type(block) for block in after.blocks] == [type(block) for block in before.blocks]


@pytest.mark.parametrize(
    ("assignment", "fix"),
    [
        ("dat=2", "fields are data, sharding"),
        ("tensor", "write it like tensor=2"),
        ("tensor=two", "write a whole number above 0"),
        ("tensor=0", "write a whole number above 0"),
        ("sharding=some", "write one of none, zero1, zero2, full, hybrid"),
        ("sequence_parallel=maybe", "write true or false"),
    ],
)
def test_an_override_that_is_none_names_what_would_be(assignment: str, fix: str):
    with pytest.raises(JobError) as caught:
        with_overrides(PLANNED, [assignment])
    assert caught.value.problems[0].code == "V002"
    assert fix in caught.value.problems[0].fix


def case(tmp_path: Path, *overrides: str, **options: Any) -> Any:
    job = parse_job(JOB, source="job.yaml", folder=tmp_path)
    return small_case(job, plan_job(job), overrides=overrides, **options)


def test_a_case_says_what_was_made_small_and_what_is_predicted(tmp_path: Path):
    found = case(tmp_path, "data=2", "sharding=full", "pipeline=1", "tensor=1", "context=1")
    assert any("hidden 64 (of 256)" in note for note in found.notes)
    assert "samples of 32 tokens, not 128" in found.notes
    assert found.predicted is not None
    assert found.predicted["optimizer"] == 2 * found.predicted["parameters"]
    assert found.num_samples % found.layout.global_batch != 0


def test_s1_12_the_compression_that_the_job_asks_for_is_run_too(tmp_path: Path):
    asked = JOB.replace("steps: 100", "steps: 100, gradient_compression: fp16")
    job = parse_job(asked, source="job.yaml", folder=tmp_path)
    overrides = ("data=2", "sharding=none", "pipeline=1", "tensor=1", "context=1")
    runs = small_case(job, plan_job(job), overrides=overrides).runs
    kinds = [run.compression for run in runs if run.name.startswith("compressed")]
    assert kinds == ["fp16", "bf16", "powersgd"]


def test_fewer_ranks_than_asked_for_are_noted(tmp_path: Path):
    found = case(tmp_path, "data=2", "pipeline=1", "tensor=1", "context=1", ranks=3)
    assert any(note.startswith("on 2 ranks, not 3: the small layout is") for note in found.notes)


def test_one_rank_is_refused(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        case(tmp_path, "data=1", "pipeline=1", "tensor=1", "context=1", "sharding=none")
    assert caught.value.problems[0].code == "V001"


def test_a_layout_of_more_ranks_than_asked_for_is_refused(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        case(tmp_path, "data=4", "pipeline=1", "tensor=1", "context=1", ranks=2)
    assert "needs 4 ranks, and --ranks is 2" in caught.value.problems[0].what
    # That fewer data ranks are the way to so few was left to the reader.
    assert caught.value.problems[0].fix.startswith("--layout data=2, or --ranks 4")


def test_s3_11_where_no_fewer_data_ranks_help_none_are_named(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        case(tmp_path, "data=1", "pipeline=2", "tensor=2", "context=1", ranks=3)
    assert caught.value.problems[0].fix == "--ranks 4, or leave --ranks out"

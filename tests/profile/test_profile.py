"""What a model costs, against published counts and against the real module."""

from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.profile import (
    BlockFacts,
    DecoderShape,
    ModuleFacts,
    profile_decoder,
    profile_module,
    resolve_decoder,
)

JOB = """\
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {path: x, seq_len: 16}
train: {global_batch: 8, steps: 100}
"""


def job(*overrides: str) -> Job:
    return parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def shape_of(*overrides: str) -> DecoderShape:
    shape = resolve_decoder(job(*overrides))
    assert shape is not None
    return shape


# Counts of the safetensors files on huggingface.co, as the model pages show them.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen2-7b": 7_615_616_512,
}


@pytest.mark.parametrize(("preset", "count"), PUBLISHED.items())
def test_a_preset_has_exactly_the_published_parameters(preset: str, count: int):
    shape = shape_of(f"model={{preset: {preset}}}")
    assert profile_decoder(shape, 4096).num_parameters == count


def test_tied_embeddings_count_once():
    untied = profile_decoder(shape_of(), 16).num_parameters
    tied = profile_decoder(shape_of("model.decoder.tied_embeddings=true"), 16).num_parameters
    assert untied - tied == 256 * 64


def test_blocks_and_root_add_up_to_the_model():
    profile = profile_decoder(shape_of("model={preset: qwen2-7b}"), 16)
    in_blocks = profile.num_blocks * profile.num_block_parameters
    assert in_blocks + profile.num_root_parameters == profile.num_parameters
    assert profile.num_blocks == 28


def a_token_flops(shape: DecoderShape, seq_len: int) -> float:
    flops = profile_decoder(shape, seq_len).forward_flops_per_sample
    assert flops is not None
    return flops / seq_len


def test_flops_are_close_to_two_a_parameter_and_token_on_short_samples():
    shape = shape_of("model={preset: llama-2-7b}")
    without_embedding = 6_738_415_616 - shape.vocab * shape.hidden
    assert a_token_flops(shape, 16) == pytest.approx(2 * without_embedding, rel=2e-3)


def test_causal_attention_counts_half_of_the_scores():
    shape = shape_of("model={preset: llama-2-7b}")
    extra = a_token_flops(shape, 4096) - a_token_flops(shape, 1)
    assert extra == pytest.approx(32 * 2 * 4096 * 4096, rel=1e-3)


def test_auto_sizes_are_resolved():
    shape = shape_of("model.decoder.hidden=128")
    assert (shape.kv_heads, shape.ffn, shape.head_dim) == (4, 352, 32)


@pytest.mark.parametrize(
    ("overrides", "code", "what", "fix"),
    [
        (
            ("model.decoder.heads=5",),
            "M005",
            "heads 5 does not divide hidden 64",
            "set heads to 2 or 4",
        ),
        (
            ("model.decoder.heads=64",),
            "M007",
            "a head is 1 wide (hidden 64, heads 64)",
            "set heads to 16 or 32",
        ),
        (
            ("model.decoder.kv_heads=3",),
            "M006",
            "kv_heads 3 does not divide heads 4",
            "set kv_heads to 2 or 4",
        ),
    ],
)
def test_sizes_that_clash_name_the_nearest_that_work(
    overrides: tuple[str, ...], code: str, what: str, fix: str
):
    with pytest.raises(JobError) as caught:
        shape_of(*overrides)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert what in problem.what
    assert problem.fix == fix
    assert problem.where.endswith("--set")


def test_several_clashes_are_shown_at_once():
    with pytest.raises(JobError) as caught:
        shape_of("model.decoder.heads=6", "model.decoder.kv_heads=4")
    assert [problem.code for problem in caught.value.problems] == ["M005", "M006"]


def test_a_factory_has_no_decoder_shape():
    assert resolve_decoder(job("model={factory: 'm:f'}", "program=m:t")) is None


def test_a_module_of_your_own_has_exact_parameters_and_unknown_flops():
    blocks = (
        BlockFacts(name="Encoder", count=2, num_parameters=30),
        BlockFacts(name="Decoder", count=1, num_parameters=20),
    )
    profile = profile_module(ModuleFacts(num_parameters=100, blocks=blocks))
    assert (profile.num_parameters, profile.num_blocks) == (100, 3)
    assert profile.num_block_parameters == 30
    assert profile.num_root_parameters == 20
    assert profile.forward_flops_per_sample is None

"""Can a job resume from a checkpoint: the verdict before the launch, and the command that helps."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.check.resume import Fit, Verdict, judge_foreign, judge_ours
from paceline.errors import Problem
from paceline.parallel import Layout
from paceline.record.checkpoints import Manifest
from paceline.record.external_checkpoints import ForeignCheckpoint

AT = Path("/ckpt/a run/global_step100")


def layout(data: int = 2, tensor: int = 1, pipeline: int = 1) -> Layout:
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        sharding="none",
        micro_batch=1,
        accumulation=1,
    )


def verdict(kind: Any, engine: str, wanted: Layout, **facts: Any) -> Verdict:
    config, damage = facts.pop("job_config", None), facts.pop("damage", ())
    found = ForeignCheckpoint(
        kind=kind, path=AT, root=AT.parent, holds_optimizer=True, step=100, **facts
    )
    return judge_foreign(
        found, engine=engine, layout=wanted, job="my job.yaml", config=config, damage=damage
    )


def test_zero_is_read_by_as_many_ranks_as_wrote_it():
    said = verdict("deepspeed", "deepspeed", layout(data=4), degrees={"data": 4, "tensor": 1})
    assert said.fit is Fit.COMPATIBLE
    assert said.keeps == "weights, optimizer, step"


def test_zero_on_another_number_of_ranks_has_the_exact_command():
    said = verdict("deepspeed", "deepspeed", layout(data=2), degrees={"data": 4, "tensor": 1})
    assert said.fit is Fit.CONVERTIBLE
    (command,) = said.commands
    words = shlex.split(command)
    assert words[2] == "deepspeed.checkpoint.ds_to_universal"
    assert words[words.index("--input_folder") + 1] == str(AT)
    assert words[words.index("--output_folder") + 1] == f"{AT}_universal"
    assert said.why[0].startswith("data was 4 and becomes 2")
    assert "load_universal" in said.why[1]


def test_a_universal_checkpoint_is_read_by_any_number_of_ranks():
    said = verdict("deepspeed", "deepspeed", layout(data=16), form="universal", degrees={"data": 1})
    assert said.fit is Fit.COMPATIBLE


def test_deepspeeds_pipeline_is_held_against_tensor_times_pipeline():
    degrees = {"data": 2, "model": 8}
    same = verdict("deepspeed", "deepspeed", layout(2, 2, 4), degrees=degrees)
    other = verdict("deepspeed", "deepspeed", layout(2, 2, 2), degrees=degrees)
    assert (same.fit, other.fit) == (Fit.COMPATIBLE, Fit.CONVERTIBLE)


def test_megatrons_legacy_form_is_converted_to_the_jobs_degrees():
    said = verdict(
        "megatron", "megatron", layout(1, 4, 2), form="legacy", degrees={"tensor": 2, "pipeline": 2}
    )
    assert said.fit is Fit.CONVERTIBLE
    assert "--target-tensor-parallel-size 4 --target-pipeline-parallel-size 2" in said.commands[0]
    assert said.keeps.startswith("weights alone")


@pytest.mark.parametrize(
    ("kept", "tensor", "fit"),
    [
        ("dp_reshardable", 2, Fit.COMPATIBLE),
        ("dp_reshardable", 4, Fit.CONVERTIBLE),
        ("fully_reshardable", 4, Fit.COMPATIBLE),
    ],
)
def test_megatrons_distributed_form_goes_by_what_its_optimizer_was_saved_for(kept, tensor, fit):
    said = verdict(
        *("megatron", "megatron", layout(8, tensor)),
        form="torch_dist",
        degrees={"tensor": 2, "pipeline": 1},
        optimizer_form=kept,
    )
    assert said.fit is fit


@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
def test_what_accelerate_writes_whole_is_read_by_any_number_of_ranks(kind):
    assert verdict(kind, "accelerate", layout(8), degrees={"ranks": 2}).fit is Fit.COMPATIBLE


def test_another_programs_checkpoint_gives_a_job_of_ours_its_weights():
    said = verdict("deepspeed", "paceline", layout(), degrees={"data": 4, "tensor": 1})
    assert said.fit is Fit.CONVERTIBLE
    assert said.keeps.startswith("weights alone")
    first, second = (shlex.split(command) for command in said.commands)
    assert first == ["paceline", "checkpoint", "convert", str(AT), "start"]
    assert second == ["paceline", "run", "my job.yaml", "--from", "start/step-00000000"]


def test_what_deepspeeds_tensor_ranks_cut_up_is_made_universal_first():
    said = verdict("deepspeed", "paceline", layout(), degrees={"data": 4, "tensor": 2})
    first, second, _ = (shlex.split(command) for command in said.commands)
    assert first[:3] == ["python", "-m", "deepspeed.checkpoint.ds_to_universal"]
    assert second[3] == first[-1]


@pytest.mark.parametrize("kind", ["megatron", "dcp"])
def test_s3_8_what_convert_reads_gives_a_job_of_ours_its_weights(kind):
    assert verdict(kind, "paceline", layout()).fit is Fit.CONVERTIBLE


@pytest.mark.parametrize("kind", ["weights", "accelerate", "trainer", "adapter"])
def test_what_has_no_weights_to_read_is_refused_with_the_reason(kind):
    said = verdict(kind, "paceline", layout())
    assert said.fit is Fit.NOT
    assert said.why


def test_s0_18_what_is_cut_off_is_never_convertible():
    damage = Problem(code="M012", what="it ends early", where="x", fix="download it again")
    said = verdict("weights", "paceline", layout(), is_safetensors=True, damage=[damage])
    assert said.fit is Fit.NOT
    assert "M012: it ends early; download it again" in said.why


def test_weights_alone_are_no_training_state_of_any_program():
    said = verdict("weights", "deepspeed", layout(), is_safetensors=True, config={"vocab_size": 8})
    assert said.fit is Fit.NOT
    assert "from_pretrained" in said.why[1]


def test_a_model_of_other_sizes_is_refused_by_them():
    said = verdict(
        *("trainer", "accelerate", layout()),
        config={"hidden_size": 512, "vocab_size": 8},
        job_config={"hidden_size": 768, "vocab_size": 8},
    )
    assert (said.fit, list(said.why)) == (Fit.NOT, ["hidden_size is 512 there and 768 in the job"])


def test_a_checkpoint_that_is_not_whole_is_never_compatible():
    said = verdict("deepspeed", "deepspeed", layout(), degrees={"data": 2}, missing=["zero_pp_1"])
    assert said.fit is Fit.NOT
    assert "zero_pp_1" in said.why[0]


def test_ours_is_read_in_any_layout_by_the_job_that_it_is_of():
    manifest = Manifest(
        step=5, world_size=8, files={}, mesh={"data": 4, "tensor": 2}, job_digest="a"
    )
    same = judge_ours(manifest, "step-5", layout=layout(1), digest="a")
    other = judge_ours(manifest, "step-5", layout=layout(1), digest="b")
    assert (same.fit, other.fit) == (Fit.COMPATIBLE, Fit.NOT)
    assert same.wrote == "Paceline, step 5, 8 ranks: data 4, tensor 2"
    assert same.keeps == "weights, optimizer, step, data position"


def test_what_was_made_of_weights_says_that_the_optimizer_begins_anew():
    manifest = Manifest(step=0, world_size=1, files={})
    said = judge_ours(manifest, "step-0", layout=layout(), digest="a")
    assert (said.fit, said.keeps.partition(":")[0]) == (Fit.COMPATIBLE, "weights alone")

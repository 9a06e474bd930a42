"""Published runs are read and priced as `benchmarks/planner_accuracy.py` does it.

The sample is one run of each of 20 sources, the one of median step time; its figures are facts that
the sources named in it printed.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.catalog.efficiencies import load_efficiencies

HERE = Path(__file__).parent
SAMPLE = HERE / "recorded" / "published_sample.csv"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_the_path():
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    yield
    sys.path.pop(0)


def runs_of(path: Path):
    from published import read

    return read(path)


def test_every_row_of_the_sample_is_read_and_its_accelerator_known():
    from published_columns import why_out_of_scope

    reading = runs_of(SAMPLE)
    assert reading.left_out == []
    assert [why_out_of_scope(run) for run in reading.runs] == [None] * len(reading.runs)


def test_steps_of_the_sample_are_near_what_was_published():
    from published_columns import columns_of

    timed = [run for run in runs_of(SAMPLE).runs if run.step_s]
    predicted = columns_of(timed).step_s(load_efficiencies())
    errors = np.abs(np.log(predicted / np.array([run.step_s for run in timed])))
    assert np.median(errors) < 0.15


def test_memory_of_the_sample_is_near_what_was_published():
    from published_columns import columns_of

    weighed = [run for run in runs_of(SAMPLE).runs if run.peak_bytes and run.micro_batch]
    predicted = columns_of(weighed).peak_bytes()
    errors = np.abs(np.log(predicted / np.array([run.peak_bytes for run in weighed])))
    assert np.median(errors) < 0.12


def changed(tmp_path: Path, **values: str) -> Path:
    """The sample's first row with some of its cells written over."""
    with SAMPLE.open(newline="") as file:
        row = next(csv.DictReader(file)) | values
    path = tmp_path / "changed.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


@pytest.mark.parametrize(
    "column",
    ["TP", "PP", "CP", "EP", "micro_batch", "global_batch", "n_heads", "gpus_per_node"],
)
def test_a_blank_cell_is_unknown_and_the_row_is_still_priced(tmp_path, column):
    from published_columns import columns_of

    (run,) = runs_of(changed(tmp_path, **{column: ""})).runs
    assert np.isfinite(columns_of([run]).step_s(load_efficiencies())).all()


def test_a_row_without_sizes_is_left_out_and_says_why(tmp_path):
    reading = runs_of(changed(tmp_path, n_layers=""))
    assert reading.runs == []
    assert "sizes are not stated" in reading.left_out[0][1]


def test_an_unknown_accelerator_is_out_of_scope_and_says_which(tmp_path):
    from published_columns import why_out_of_scope

    (run,) = runs_of(changed(tmp_path, accelerator="Abacus 9")).runs
    assert "Abacus 9" in (why_out_of_scope(run) or "")


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("activation_ckpt", "every 2"),
        ("activation_ckpt", "Full"),
        ("precision", "amp_bf16"),
        ("data_parallel_kind", "ZeRO-1"),
        ("data_parallel_kind", "zero3+offload"),
        ("framework", "ROCm Megatron-LM"),
        ("framework", "a program nobody knows"),
        ("step_time_s", "~16.3"),
        ("year", "2024-05"),
        ("global_batch", "4,096"),
        ("peak_mem_gib", "OOM"),
    ],
)
def test_other_spellings_are_read(tmp_path, column, text):
    from published_columns import columns_of, why_out_of_scope

    (run,) = runs_of(changed(tmp_path, **{column: text})).runs
    assert why_out_of_scope(run) is None
    assert np.isfinite(columns_of([run]).step_s(load_efficiencies())).all()


@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        ("NVIDIA Megatron-LM", "megatron"),
        ("vTrain Megatron-DeepSpeed", "megatron-deepspeed"),
        ("Microsoft DeepSpeed", "deepspeed"),
        ("MaxText (JAX)", "maxtext"),
        ("MosaicML Composer", "fsdp1"),
        ("LLaMA-Factory", "accelerate"),
        ("PyTorch FSDP2", "paceline"),
    ],
)
def test_an_engine_is_found_anywhere_in_a_frameworks_name(tmp_path, framework, engine):
    (run,) = runs_of(changed(tmp_path, framework=framework)).runs
    assert run.engine.name == engine


@pytest.mark.parametrize("column", ["n_gpus", "seq_len"])
@pytest.mark.parametrize("text", ["", "0", "-8"])
def test_a_run_that_cannot_be_is_left_out_and_says_why(tmp_path, column, text):
    reading = runs_of(changed(tmp_path, **{column: text}))
    assert reading.runs == []
    assert "not stated" in reading.left_out[0][1]


@pytest.mark.parametrize(
    ("notes", "field", "value"),
    [
        ("optimizer=PagedAdamW8bit", "optimizer", "adamw-8bit"),
        ("optimizer=PagedAdamW8bit", "is_paged", True),
        ("optimizer_in_bwd=True", "optimizer_in_backward", True),
        ("optimizer_in_bwd=False", "optimizer_in_backward", False),
        ("attn=triton flash", "attention", "flash1"),
        ("attn_impl=flash_attention_2", "attention", "flash2"),
        ("attn=cudnn", "attention", "flash3"),
        ("flash_attn=0", "attention", "unfused"),
        ("schedule=ZB-V", "schedule", "zero-bubble"),
        ("schedule=ZB-V", "virtual_stages", 2),
        ("schedule=zb2p", "unknown_schedule", "zb2p"),
        ("schedule=Interleaved1F1B", "schedule", "interleaved"),
        ("fsdp_mixed_precision=PURE", "reduce_bytes", 2),
        ("fsdp_mixed_precision=PURE", "parameter_bytes", None),
        ("fsdp_mixed_precision=DEFAULT", "reduce_bytes", 4),
        ("bf16-true weights", "parameter_bytes", 2),
        ("param_dtype=float32", "parameter_bytes", 4),
        ("use_liger_kernel=true", "no_logits", True),
        ("prec_recipe=rowwise_with_gw_hp", "row_scales", True),
        ("prec_recipe=rowwise_with_gw_hp", "wide_weight_gradients", True),
        ("float8 recipe_name=rowwise", "row_scales", True),
        ("float8 recipe_name=rowwise", "wide_weight_gradients", False),
        ("prec_recipe=tensorwise", "row_scales", False),
        ("async_tp=1", "overlaps_tensor", True),
        ("async TP", "overlaps_tensor", True),
        ("enable_async_tensor_parallel=false", "overlaps_tensor", False),
        ("nothing of the kind", "optimizer", "adamw"),
    ],
)
def test_a_rows_notes_are_read(tmp_path, notes, field, value):
    (run,) = runs_of(changed(tmp_path, notes=notes)).runs
    assert getattr(run.stated, field) == value


def test_a_schedule_that_no_engine_has_is_out_of_scope_and_says_which(tmp_path):
    from published_columns import why_out_of_scope

    path = changed(tmp_path, notes="schedule=ZB-2p", PP="2", TP="1", CP="1", n_gpus="8")
    (run,) = runs_of(path).runs
    assert "zb-2p" in (why_out_of_scope(run) or "")


@pytest.mark.parametrize(
    ("changes", "slower", "faster"),
    [
        ({"precision": "fp8"}, "prec_recipe=rowwise", "prec_recipe=tensorwise"),
        ({"precision": "fp8"}, "prec_recipe=rowwise_with_gw_hp", "prec_recipe=tensorwise"),
        ({"TP": "4"}, "", "async_tp=1"),
    ],
)
def test_recipes_of_one_precision_and_async_tp_are_priced_apart(tmp_path, changes, slower, faster):
    from published_columns import columns_of

    row = {"framework": "torchtitan", "accelerator": "H100-SXM", "n_gpus": "8", "PP": "1"} | changes
    seconds = [
        columns_of(runs_of(changed(tmp_path, notes=notes, **row)).runs).step_s(load_efficiencies())
        for notes in (slower, faster)
    ]
    assert seconds[0][0] > seconds[1][0]


def test_every_second_block_recomputed_is_full_recompute_of_half_of_them(tmp_path):
    (run,) = runs_of(changed(tmp_path, activation_ckpt="selective (2)")).runs
    assert (run.recompute, run.stated.recompute_every) == ("full", 2)


def test_an_engines_facts_are_those_of_its_version_or_its_rows_year(tmp_path):
    rows = [
        {"framework": "torchtune 0.2.1", "year": "2025"},
        {"framework": "torchtune", "year": "2023"},
        {"framework": "torchtune", "year": "2026"},
    ]
    kept = [runs_of(changed(tmp_path, **row)).runs[0].engine.logit_bytes for row in rows]
    assert kept == [8, 8, 4]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("A100-SXM4-80GB", 84e9, 87e9), ("H100 64GB", 68e9, 69e9)]
)
def test_a_variant_of_a_card_has_the_memory_that_its_name_states(tmp_path, name, least, most):
    from published_columns import cluster_of

    (run,) = runs_of(changed(tmp_path, accelerator=name)).runs
    assert least < cluster_of(run).memory_bytes < most

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

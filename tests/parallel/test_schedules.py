"""What each pipeline schedule needs: one row, read by the planner, the laws and the runtime."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from torch.distributed import pipelining

import paceline
from paceline.choices import Schedule
from paceline.choices.pipeline_schedules import LOOPED, PLAIN, SCHEDULE_FACTS
from paceline.estimate import case_of, stage_memory
from paceline.job import parse_job
from paceline.parallel import Layout, word_columns
from paceline.parallel.table import SCHEDULES, code_of
from paceline.parallel.word_columns import (
    forwards_first,
    is_in_v,
    least_rounds,
    splits_backward,
    stages_each,
    takes_rounds,
)
from paceline.profile import resolve_profile
from paceline.topology import find_cluster

SOURCE = Path(paceline.__file__).parent


def names(path: Path, word: str) -> bool:
    """Whether a file has the word in quotes, alone: in Python as a value, not in a docstring."""
    text = path.read_text(encoding="utf-8")
    if f'"{word}"' not in text or path.suffix == ".toml":
        return f'"{word}"' in text
    values = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Constant))
    return any(each.value == word for each in values)


@pytest.mark.parametrize("word", get_args(Schedule))
def test_a_schedule_is_named_in_its_row_its_times_and_the_list_of_engines(word):
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.toml")]
    assert {str(path.relative_to(SOURCE)) for path in files if names(path, word)} == {
        "catalog/abilities.toml",
        "choices/pipeline_schedules.py",
        "estimate/schedule.py",
    }


def test_every_schedule_has_a_row_and_classes_of_torch():
    assert set(SCHEDULE_FACTS) == set(get_args(Schedule))
    for facts in SCHEDULE_FACTS.values():
        assert hasattr(pipelining, facts.torch_class)
        assert facts.torch_class_in_v is None or hasattr(pipelining, facts.torch_class_in_v)


def test_the_plain_schedule_is_1f1b_and_chunks_alone_mean_interleaved():
    assert (PLAIN, LOOPED) == ("1f1b", ("interleaved",))


def test_columns_say_what_the_rows_say():
    codes = np.array([code_of("schedule", word) for word in SCHEDULES])
    ones, twos = np.ones(len(codes), int), np.full(len(codes), 2)
    in_v = dict(zip(SCHEDULES, is_in_v(codes, ones), strict=True))
    assert [word for word, is_v in in_v.items() if is_v] == ["dualpipe-v"]
    in_v = dict(zip(SCHEDULES, is_in_v(codes, twos), strict=True))
    assert [word for word, is_v in in_v.items() if is_v] == ["zero-bubble", "dualpipe-v"]
    loops = dict(zip(SCHEDULES, takes_rounds(codes, ones), strict=True))
    assert [word for word, is_loop in loops.items() if is_loop] == ["interleaved", "zero-bubble"]
    for word, code in zip(SCHEDULES, codes, strict=True):
        facts = SCHEDULE_FACTS[word]
        assert splits_backward(code) == facts.splits_backward
        assert forwards_first(code) == facts.forwards_first
        assert least_rounds(code) == facts.least_rounds
        assert stages_each(code, 1) == (2 if facts.chunks == "two" else 1)


def test_a_schedule_whose_row_goes_forward_first_holds_the_loss_of_every_micro_batch(monkeypatch):
    """`gpipe` was asked for by its name: another such schedule was planned with 15 of 59 GiB."""
    text = """\
model: {preset: llama-3.2-1b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 1, per_node: 2}
train: {global_batch: 16, steps: 100}
"""
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=16, pipeline=2)

    def held(schedule: Schedule) -> float:
        of_last = stage_memory(replace(layout, schedule=schedule), case)[1]
        return of_last.parts["activations"]

    before, of_gpipe = held("1f1b"), held("gpipe")
    monkeypatch.setattr(word_columns, "_FORWARDS", np.ones(len(SCHEDULES), bool))
    assert held("gpipe") == of_gpipe
    logits = 15 * 4096 * 128_256 * 2
    assert held("1f1b") - before > logits

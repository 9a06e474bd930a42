"""Preference tuning: TRL's numbers, the same in every layout, and a reference that is kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.dpo_golden import BETA, CONFIG, FILE, ROWS, fill, save_tokenizer

from paceline.job import parse_job
from paceline.parallel.layout import Layout
from paceline.prepare import prepared
from paceline.runtime import strategy
from paceline.runtime.data import PreparedData, load_prepared
from paceline.runtime.huggingface import build_hf
from paceline.runtime.preference import Pairs, PreferenceLoss, _Recorder

SEQ_LEN = 160
GOLDEN = json.loads(FILE.read_text())


def prepare_rows(folder: Path) -> Path:
    """The golden rows, prepared; the folder of what was made."""
    save_tokenizer(folder / "tokenizer")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text = f"""
model: {{hf_config: config.json, tokenizer: tokenizer}}
train: {{global_batch: 3, steps: 1}}
data: {{kind: preference, path: pairs.jsonl, seq_len: {SEQ_LEN}, held_out: 0}}
"""
    return prepared(parse_job(text, source="job.yaml", folder=folder))


def pairs_in(folder: Path) -> Pairs:
    data, _ = load_prepared(folder)
    assert isinstance(data, PreparedData)
    return Pairs(data, first=0)


def test_prepared_pairs_are_the_tokens_of_trl(tmp_path):
    pairs = pairs_in(prepare_rows(tmp_path))
    inputs_BS, targets_BT, ends_BE = pairs.samples(range(3))
    found = []
    for inputs_S, targets_T, (middle, end, _) in zip(
        inputs_BS.tolist(), targets_BT.tolist(), ends_BE.tolist(), strict=True
    ):
        assert targets_T[-2] == middle
        found.append((inputs_S[:middle], targets_T[:middle]))
        found.append((inputs_S[middle:end], targets_T[middle:end]))
    chosen_first = [*found[::2], *found[1::2]]
    for (inputs, targets), tokens, trained in zip(
        chosen_first, GOLDEN["tokens"], GOLDEN["trained"], strict=True
    ):
        wanted = [
            token if is_trained else strategy.IGNORED
            for token, is_trained in zip(tokens, trained, strict=True)
        ]
        assert inputs == tokens[: len(inputs)]
        assert targets == wanted[1 : len(targets) + 1]
        assert not any(trained[len(targets) + 1 :])


def step_of(rank: int, world: int, folder: Path, fields: dict[str, Any]) -> tuple[float, ...]:
    """Loss, gradient norm and accuracy of one step, by the runtime in a layout."""
    layout = Layout(micro_batch=1, **fields)
    meshes = strategy.make_meshes(layout, "cpu")
    pairs = pairs_in(folder)

    def build(seed: int) -> torch.nn.Module:
        whole = build_hf(CONFIG, source="config.json", where="")
        fill(whole, seed)
        ways = strategy.ways_of(whole)
        return strategy.apply(whole, layout, meshes, precision="fp32", ways=ways)

    place = meshes.place
    mine = range(place.data, 3, layout.data)
    batches = [pairs.samples([n]) for n in mine]
    recorder = _Recorder(3, torch.device("cpu"))
    strategy.evaluate(build(0), meshes, batches, precision="fp32", loss_of=recorder)
    if not meshes.counts_loss:
        recorder.sums_N2.zero_()
    torch.distributed.all_reduce(recorder.sums_N2)
    model = build(1)
    losses = strategy.forward_backward(
        model,
        meshes,
        batches,
        precision="fp32",
        loss_of=PreferenceLoss(BETA, recorder.sums_N2),
        targets_per_sample=1.0,
    )
    norm = float(strategy.gradient_norm(model, meshes))
    sums = torch.stack([losses.loss_sum, losses.num_targets, losses.num_right])
    torch.distributed.all_reduce(sums)
    loss_sum, num_pairs, num_right = sums.tolist()
    assert num_pairs == 3
    return loss_sum / num_pairs, norm, num_right / num_pairs


def check(found: tuple[float, ...], *, norm_off: float = 1e-4) -> None:
    """In float32; a split model has its sums in another order."""
    loss, norm, accuracy = found
    assert abs(loss - GOLDEN["loss"]) <= 1e-6
    assert abs(norm / GOLDEN["grad_norm"] - 1) <= norm_off
    assert accuracy == pytest.approx(GOLDEN["accuracy"])


ONE = {"data": 1, "sharding": "none", "accumulation": 3}


@pytest.mark.ranks
def test_loss_and_gradient_are_those_of_trl(tmp_path):
    (found,) = run_ranks(step_of, 1, prepare_rows(tmp_path), ONE)
    assert abs(GOLDEN["loss"] - math.log(2)) > 1e-3  # a margin of zero would not do
    check(found, norm_off=1e-5)


OF_TWO = {
    "TP": {"data": 1, "sharding": "none", "tensor": 2, "accumulation": 3},
    "PP": {"data": 1, "sharding": "none", "pipeline": 2, "accumulation": 3},
}


def step_of_all(rank: int, world: int, folder: Path) -> dict[str, tuple[float, ...]]:
    return {name: step_of(rank, world, folder, fields) for name, fields in OF_TWO.items()}


@pytest.mark.ranks
def test_the_loss_is_the_same_of_split_vocabularies_and_pipelines(tmp_path):
    for found in run_ranks(step_of_all, 2, prepare_rows(tmp_path)):
        for each in found.values():
            check(each)


def step_of_three(rank: int, world: int, folder: Path) -> dict[str, tuple[float, ...]]:
    shardings = ("none", "zero2", "full")
    fields = {"data": 3, "accumulation": 1}
    return {each: step_of(rank, world, folder, fields | {"sharding": each}) for each in shardings}


@pytest.mark.ranks
@pytest.mark.slow
def test_the_loss_is_the_same_on_data_ranks(tmp_path):
    for found in run_ranks(step_of_three, 3, prepare_rows(tmp_path)):
        for each in found.values():
            check(each)

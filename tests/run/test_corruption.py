"""A bit is flipped in one rank's parameters or optimizer state while a run goes on."""

import os
from typing import Any

import pytest
from tests.run.scene import Record, Scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

PROGRAM = """
import json, os
import torch
from torch import nn
from paceline.runtime import Session
from paceline.runtime.strategy.local import local_of

FLIPS = json.loads(os.environ.get("FLIPS", "[]"))

def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

def flip(tensor, bit):
    bytes_ = local_of(tensor.detach()).view(-1).view(torch.uint8)
    bytes_[bit // 8] ^= 1 << bit % 8

def train(session: Session) -> None:
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    model = session.build(build_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = session.keep("done", list)

    def fire(moment, number):
        for flip_ in FLIPS:
            if (flip_["at"], flip_["step"], flip_["rank"]) != (moment, number, session.place.rank):
                continue
            if flip_ not in done:
                done.append(flip_)
                parameter = list(model.parameters())[flip_["tensor"]]
                state = optimizer.state[parameter]
                flip(state["exp_avg"] if flip_.get("moment") else parameter, flip_["bit"])

    now = [0]
    optimizer.register_step_post_hook(lambda *_: fire("update", now[0]))
    for step in session.steps(model, optimizer):
        now[0] = step.number
        fire("rest", step.number)
        for ids in step.micro_batches(len(points)):
            loss = (model(points[ids]) - points[ids].sum(1, keepdim=True)).square().mean()
            step.backward(loss)
        step.apply()
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("flips"))
    scene.job = {
        "name": "flips",
        "model": {"factory": "mine:build_model"},
        "program": "mine:train",
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": 12, "steps": 14, "learning_rate": 0.01, "precision": "fp32"},
        "checkpoint": {"every": 4},
        "recovery": {"fingerprint_every": 1, "spares": 0},
    }
    scene.write_job()
    (scene.folder / "mine.py").write_text(PROGRAM)
    return scene


def ranks(num: int, sharding: str = "none") -> tuple[str, ...]:
    return ("--set", f"cluster.per_node={num}", "--set", f"layout.sharding={sharding}")


def run(scene: Scene, out: str, flips: list[dict[str, Any]], *options: str) -> Record:
    import json

    os.environ["FLIPS"] = json.dumps(flips)
    try:
        return scene.run(out, *options)
    finally:
        del os.environ["FLIPS"]


def assert_same_end(run: Record, clean: Record) -> None:
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    assert [line.loss for line in run.metrics] == [line.loss for line in clean.metrics]
    assert run.finished.restarts == 0


@pytest.fixture(scope="module")
def clean_two(scene: Scene) -> Record:
    return run_clean(scene, "clean-two", *ranks(2))


@pytest.fixture(scope="module")
def clean_three(scene: Scene) -> Record:
    return run_clean(scene, "clean-three", *ranks(3))


@pytest.fixture(scope="module")
def clean_fsdp2(scene: Scene) -> Record:
    return run_clean(scene, "clean-fsdp2", *ranks(2, "full"))


def run_clean(scene: Scene, out: str, *options: str) -> Record:
    found = run(scene, out, [], *options)
    assert not found.of(log.CorruptionFound)
    return found


@pytest.mark.slow
def test_s1_19_of_three_replicas_the_odd_one_is_named_and_gets_the_others_numbers(
    scene, clean_three
):
    flips = [{"at": "update", "step": 6, "rank": 1, "tensor": 2, "bit": 77}]
    found = run(scene, "majority", flips, *ranks(3))
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks, event.tensors) == (6, [1], ["model/2.weight"])
    assert (event.verdict, event.healed, event.goes_on_after) == ("majority", "replica", 6)
    assert_same_end(found, clean_three)


@pytest.mark.slow
def test_a_flip_in_the_optimizer_of_one_of_two_while_nothing_writes_is_copied_over(
    scene, clean_two
):
    flips = [{"at": "rest", "step": 9, "rank": 0, "tensor": 0, "bit": 30, "moment": True}]
    found = run(scene, "moved", flips, *ranks(2))
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks) == (8, [0])
    assert event.tensors == ["optimizer/0.weight/exp_avg"]
    assert (event.verdict, event.healed, event.goes_on_after) == ("moved", "replica", 8)
    assert_same_end(found, clean_two)


def test_of_two_replicas_the_steps_done_again_name_the_wrong_one(scene, clean_two):
    flips = [{"at": "update", "step": 7, "rank": 1, "tensor": 0, "bit": 51}]
    found = run(scene, "replay", flips, *ranks(2), "--set", "recovery.snapshot_every=2")
    first, second = found.of(log.CorruptionFound)
    assert (first.step, first.ranks, first.suspects) == (7, [], [0, 1])
    assert (first.verdict, first.healed, first.goes_on_after) == ("undecided", "memory", 6)
    assert (second.step, second.ranks, second.suspects) == (7, [1], [])
    assert (second.verdict, second.healed) == ("replay", "recomputed")
    assert_same_end(found, clean_two)


@pytest.mark.slow
def test_what_was_wrong_for_some_steps_goes_back_to_a_step_found_right(scene, clean_three):
    flips = [{"at": "update", "step": 6, "rank": 2, "tensor": 1, "bit": 20}]
    found = run(scene, "late", flips, *ranks(3), "--set", "recovery.fingerprint_every=5")
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks, event.verdict) == (8, [2], "majority")  # before it is saved
    assert (event.healed, event.goes_on_after) == ("checkpoint", 4)
    assert_same_end(found, clean_three)
    assert "step-00000008" in found.checkpoints


@pytest.mark.slow
def test_a_shard_without_replicas_that_changed_by_itself_comes_back_from_memory(scene, clean_fsdp2):
    flips = [{"at": "rest", "step": 11, "rank": 1, "tensor": 0, "bit": 13}]
    options = (*ranks(2, "full"), "--set", "recovery.snapshot_every=3")
    found = run(scene, "alone", flips, *options)
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks, event.verdict) == (10, [1], "moved")
    assert (event.healed, event.goes_on_after) == ("memory", 9)
    assert_same_end(found, clean_fsdp2)


@pytest.mark.slow
def test_with_nothing_to_go_back_to_all_begin_at_the_seed_again(scene, clean_fsdp2):
    flips = [{"at": "rest", "step": 3, "rank": 0, "tensor": 0, "bit": 13}]
    found = run(scene, "initial", flips, *ranks(2, "full"))
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks, event.healed, event.goes_on_after) == (2, [0], "initial", 0)
    assert_same_end(found, clean_fsdp2)


@pytest.mark.slow
def test_after_the_last_step_all_is_compared_once_more(scene, clean_three):
    flips = [{"at": "update", "step": 14, "rank": 0, "tensor": 3, "bit": 3}]
    options = (*ranks(3), "--set", "recovery.fingerprint_every=10")
    found = run(scene, "end", flips, *options)
    (event,) = found.of(log.CorruptionFound)
    assert (event.step, event.ranks) == (14, [0])
    assert_same_end(found, clean_three)

"""Runs whose global batch shrinks with their ranks, and grows back."""

import json
from collections import Counter
from math import sqrt

import pytest
from tests.run.scene import Record, Scene
from tests.run.test_own_code import own_scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

NUM_POINTS = 64

SHRINKS = (
    *("--set", "cluster.nodes=3", "--set", "cluster.per_node=1", "--set", "train.global_batch=9"),
    *("--set", "recovery.spares=0", "--set", "recovery.replace_timeout=1"),
    *("--set", "train.steps=20", "--set", "train.schedule=constant"),
    *("--set", "recovery.batch=shrink", "--set", "layout.micro_batch=3"),
)

NOTES_ITS_IDS = (
    "open('ids.jsonl', 'a').write(__import__('json').dumps([session.run.path.name, step.number, "
    "session.place.generation, ids.tolist()]) + '\\n')"
)
"""What each micro-batch of every rank read, as the program itself saw it."""

UNTIL_IT_IS_BACK = "; __import__('time').sleep(0.3 if session.place.world_size == 2 else 0.02)"


def lost(away: str, rank: int = 1, step: int = 6) -> str:
    return f"node rank={rank} step={step} for={away}"


def faults(*texts: str) -> tuple[str, str]:
    return "--set", f"drill.faults=[{', '.join(texts)}]"


def noting_scene(folder, *, more: str = "", optimizer: str = "AdamW(model.parameters())") -> Scene:
    scene = own_scene(folder, fault=NOTES_ITS_IDS + more)
    program = scene.folder / "mine.py"
    text = program.read_text().replace("nn.Dropout(0.5), ", "")
    program.write_text(text.replace("AdamW(model.parameters())", optimizer))
    return scene


def ids_read(scene: Scene, run: Record) -> list[list[int]]:
    """The samples of each step, those of its last computation."""
    newest: dict[int, tuple[int, list[int]]] = {}
    for line in (scene.folder / "ids.jsonl").read_text().splitlines():
        name, step, generation, ids = json.loads(line)
        if name != run.folder.name:
            continue
        before, so_far = newest.get(step, (0, []))
        if generation >= before:
            newest[step] = (generation, (so_far if generation == before else []) + ids)
    return [sorted(newest[step][1]) for step in sorted(newest)]


def assert_every_sample_once_an_epoch(steps: list[list[int]]) -> None:
    """After each step no sample was read more than once more often than another."""
    read = Counter(dict.fromkeys(range(NUM_POINTS), 0))
    for ids in steps:
        read.update(ids)
        assert max(read.values()) - min(read.values()) <= 1


def batches(run: Record) -> list[tuple[int, int]]:
    return [(each.before, each.global_batch) for each in run.of(log.BatchChanged)]


def rates(run: Record) -> list[float]:
    return [line.learning_rate for line in run.metrics]


def test_s1_16_a_batch_that_shrinks_leaves_no_sample_out_and_lowers_the_learning_rate(tmp_path):
    scene = noting_scene(tmp_path)
    run = scene.run("lost", *SHRINKS, *faults(lost("600s")))
    assert run.finished.outcome == "finished", run.story
    (changed,) = run.of(log.BatchChanged)
    assert (changed.before, changed.global_batch, changed.rule) == (9, 6, "sqrt")
    steps = ids_read(scene, run)
    assert [len(ids) for ids in steps] == [9] * (changed.step - 1) + [6] * (21 - changed.step)
    assert changed.samples == 9 * (changed.step - 1)
    assert_every_sample_once_an_epoch(steps)
    assert rates(run)[changed.step - 2 :] == pytest.approx(
        [0.01] + [0.01 * sqrt(6 / 9)] * (21 - changed.step)
    )
    assert run.finished.exactness == "different"
    (promise,) = run.of(log.ExactnessChanged)
    assert (promise.exactness, promise.tolerance) == ("different", None)
    assert "2 data ranks had a global batch of 6 instead of 9" in run.output
    assert f"from step {changed.step} on the global batch is 6 (was 9)" in run.output


@pytest.mark.slow
def test_s1_16_the_batch_grows_back_with_the_ranks_and_a_resumed_run_knows_what_it_has_read(
    tmp_path,
):
    scene = noting_scene(
        tmp_path, more=UNTIL_IT_IS_BACK, optimizer="SGD(model.parameters(), lr=0.1)"
    )
    steps = ("--set", "train.steps=200")
    run = scene.run("back", *SHRINKS, *steps, *faults(lost("4s")))
    assert batches(run) == [(9, 6), (6, 9)], run.story
    small, large = run.of(log.BatchChanged)
    assert small.rate_factor == pytest.approx(6 / 9)  # linear, for SGD
    assert large.rate_factor == 1.0
    assert large.samples - small.samples == 6 * (large.step - small.step)
    again = scene.resume("back", "--set", "train.steps=206")
    assert again.finished.exactness == "different"
    read = ids_read(scene, again)
    assert [len(ids) for ids in read[-6:]] == [9] * 6
    assert_every_sample_once_an_epoch(read)


@pytest.mark.slow
def test_s1_16_shards_that_are_lost_with_their_node_come_back_with_the_sizes_of_the_batches(
    tmp_path,
):
    scene = noting_scene(tmp_path, more="; __import__('time').sleep(0.05)")
    twice = faults(lost("600s", step=10), lost("600s", rank=0, step=18))
    run = scene.run("twice", *SHRINKS, "--set", "layout.sharding=full", *twice)
    assert run.finished.outcome == "finished", run.story
    assert run.of(log.Recovered)[-1].source == "checkpoint"
    assert batches(run) == [(9, 6), (6, 3)]
    assert rates(run)[-1] == pytest.approx(0.01 * sqrt(3 / 9))
    assert_every_sample_once_an_epoch(ids_read(scene, run))

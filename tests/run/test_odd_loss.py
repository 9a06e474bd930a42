"""Ranks whose losses are not those of their peers."""

import pytest
from tests.run.test_own_code import own_scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

OTHER_TARGETS = "loss = loss * (3.0 if session.place.rank == 1 else 1.0)"


def test_s4_12_a_rank_whose_losses_stay_higher_is_named_and_an_alert_fires(tmp_path):
    scene = own_scene(tmp_path, fault=OTHER_TARGETS)
    program = scene.folder / "mine.py"
    program.write_text(program.read_text().replace("nn.Dropout(0.5), ", ""))
    three = ("--set", "cluster.per_node=3", "--set", "train.global_batch=48")
    run = scene.run("odd", *three, "--set", "train.steps=30", "--set", "recovery.spares=0")
    named = run.of(log.LossOutlierNamed)
    assert [each.rank for each in named] == [1], run.story
    assert named[0].factor == pytest.approx(3.0, rel=0.4)
    assert "loss-outlier" in [each.rule for each in run.of(log.AlertFired)]
    assert "it reads other data, or computes with other weights" in run.output

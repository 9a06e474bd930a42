"""A run whose prompts are continued at chosen steps too."""

import pytest

pytest.importorskip("transformers")
from tests.run.scene import Scene

from paceline.record import events as log
from paceline.record.outputs import read_outputs

pytestmark = pytest.mark.ranks


def test_prompts_of_a_chosen_step_whose_save_a_kill_interrupted_are_continued(tmp_path):
    scene = Scene(tmp_path)
    (tmp_path / "prompts.txt").write_text("the first words\n")
    run = scene.run(
        "run",
        *("--set", "train.steps=8", "--set", "checkpoint={every: 100, keep_last: 1}"),
        *("--set", "evaluate.prompts=prompts.txt", "--set", "evaluate.prompt_tokens=4"),
        *("--set", "evaluate.outputs_every=5", "--set", "drill.kill=[rank=1@step=5@save]"),
    )
    assert run.finished.restarts == 1
    assert [failed.step for failed in run.of(log.CheckpointFailed)] == [5]
    assert run.checkpoints == ["step-00000005", "step-00000008"]
    outputs = read_outputs(run.folder)
    assert [(step, made.prompt) for step, made in outputs.all_generations] == [
        (5, "the first words"),
        (8, "the first words"),
    ]
    assert [each.problem for each in outputs.by_step] == [None, None]
    assert "evaluate.prompts after step 5: 1 continuation" in run.output

"""Classification as a run: from pretrained weights, and exported for transformers."""

import json
import math
import random
from collections import defaultdict

import pytest
from tests.run.scene import Scene
from tests.runtime.dpo_golden import CONFIG, save_tokenizer

from paceline.record import events as log

pytestmark = pytest.mark.ranks

WORDS = {"good": ["fine", "great", "lovely"], "bad": ["poor", "awful", "dull"]}


@pytest.fixture
def scene(tmp_path) -> Scene:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    scene = Scene(tmp_path)
    fields = {key: value for key, value in CONFIG.items() if key != "model_type"}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    words = random.Random(3)
    rows = [
        {"text": f"{words.choice(WORDS[label])} {number}", "label": label}
        for number in range(120)
        for label in WORDS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scene.job["model"] = {"pretrained": "model"}
    scene.job["data"] = {
        "kind": "classification",
        "labels": ["bad", "good"],
        "path": "rows.jsonl",
        "seq_len": 64,
        "held_out": 0.2,
    }
    scene.job["train"] |= {"learning_rate": 0.01, "steps": 8}
    scene.job["layout"] = {"sharding": "full"}
    scene.job["recovery"] = {"state": "checkpoint", "spares": 0}
    scene.job["drill"] = {"faults": ["kill rank=1 step=7"], "digest_every": 1}
    scene.write_job()
    return scene


# Its loss is that of transformers in `tests/runtime/test_classification.py`; kills are in
# `test_recovery.py`, exports whose logits are compared in `tests/cli/test_export.py`.
@pytest.mark.repeat
def test_a_classifier_learns_survives_a_kill_and_loads_in_transformers(scene):
    from transformers import AutoModelForSequenceClassification

    run = scene.run("run")
    assert "read        rows as classification (label: label, text: text)\n" in run.output
    evaluated = run.of(log.Evaluated)
    assert evaluated[0].loss == pytest.approx(math.log(2), abs=0.3)
    assert evaluated[-1].loss < evaluated[0].loss
    assert all(line.accuracy is not None for line in run.metrics)
    (recovered,) = run.of(log.Recovered)
    assert recovered.resumed_from_step == 4  # where the new head comes from, too
    done = defaultdict(list)
    for line in run.all_metrics:
        done[line.step].append((line.state_digest, line.samples_digest, line.loss))
    assert [step for step, times in done.items() if len(times) == 2] == [5, 6]
    assert all(len(set(times)) == 1 and times[0][0] for times in done.values())
    assert len({digest for ((digest, *_), *_) in done.values()}) == len(done) == 8
    exported = scene.paceline("export", "run", "out")  # compares the logits of both
    assert exported.returncode == 0, exported.stdout + exported.stderr
    card = (scene.folder / "out" / "README.md").read_text()
    assert 'AutoModelForSequenceClassification.from_pretrained("FOLDER")' in card
    assert "logits" in card
    model, found = AutoModelForSequenceClassification.from_pretrained(
        str(scene.folder / "out"), output_loading_info=True
    )
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]

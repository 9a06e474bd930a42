"""Classification as a run: from pretrained weights, and exported for transformers."""

import json
import math
import random

import pytest
from tests.run.scene import Scene, assert_same_end
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
    scene.job["train"] |= {"learning_rate": 0.01}
    scene.job["layout"] = {"sharding": "full"}
    scene.write_job()
    return scene


def test_a_classifier_learns_survives_a_kill_and_loads_in_transformers(scene):
    from transformers import AutoModelForSequenceClassification

    clean = scene.run("clean")
    evaluated = clean.of(log.Evaluated)
    assert evaluated[0].loss == pytest.approx(math.log(2), abs=0.3)
    assert evaluated[-1].loss < evaluated[0].loss
    assert all(line.accuracy is not None for line in clean.metrics)
    killed = scene.run("killed", "--set", "drill.faults=['kill rank=1 step=7']")
    assert_same_end(killed, clean)
    done = scene.paceline("export", "clean", "out")  # compares the logits of both
    assert done.returncode == 0, done.stdout + done.stderr
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

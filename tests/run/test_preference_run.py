"""Preference tuning as a run: recovery ends with the same bits, and reads the reference again."""

import json
import math

import pytest
from tests.run.scene import Scene, assert_same_end
from tests.runtime.dpo_golden import save_tokenizer

from paceline.record import events as log

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("preference"))
    save_tokenizer(scene.folder / "tokenizer")
    rows = [
        {"prompt": f"Say {number}.", "chosen": f" {number}!", "rejected": " I will not."}
        for number in range(40)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (scene.folder / "pairs.jsonl").write_text(text)
    scene.job["model"] = {
        "decoder": {"layers": 2, "hidden": 32, "heads": 2, "vocab": 264},
        "tokenizer": "tokenizer",
    }
    scene.job["data"] = {
        "kind": "preference",
        "path": "pairs.jsonl",
        "seq_len": 64,
        "held_out": 0.2,
    }
    scene.job["layout"] = {"sharding": "full"}
    scene.write_job()
    return scene


# Its loss is that of TRL in `tests/runtime/test_preference.py`; kills are in `test_recovery.py`.
@pytest.mark.repeat
def test_dpo_learns_and_ends_with_the_same_bits_after_a_kill(scene):
    clean = scene.run("clean")
    evaluated = clean.of(log.Evaluated)
    assert evaluated[0].loss == pytest.approx(math.log(2), abs=1e-4)  # no margin yet
    assert evaluated[-1].loss < evaluated[0].loss
    assert evaluated[-1].accuracy > 0.5
    assert all(line.accuracy is not None for line in clean.metrics)
    (reference,) = (scene.folder / "clean").glob("reference-*.npy")
    killed = scene.run("killed", "--set", "drill.faults=['kill rank=1 step=7']")
    assert_same_end(killed, clean)
    notes = [note.text for note in killed.of(log.Noted) if "reference's" in note.text]
    assert len(notes) == 1  # computed once, before step 1
    (again,) = (scene.folder / "killed").glob("reference-*.npy")
    assert again.read_bytes() == reference.read_bytes()

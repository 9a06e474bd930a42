"""What the TensorFlow trainer refuses before anything is started. It really trains in
tests/engines/test_tensorflow_contract.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.contracts.skills import run_skill
from paceline.errors import JobError


def asked(folder: Path, **changes: dict[str, Any]) -> str:
    (folder / "model.py").write_text("def build_model(): ...\n")
    (folder / "train.npz").touch()
    request: dict[str, Any] = {
        "modelConfig": {"modelPath": "model.py"},
        "dataConfig": {"trainPath": "train.npz"},
        "trainingConfig": {"epochs": 2},
    }
    return json.dumps({name: request.get(name, {}) | changes.get(name, {}) for name in
                       {*request, *changes}})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modelConfig": {"modelPath": "no.py"}}, "H033: there is no file no.py"),
        ({"dataConfig": {"trainPath": "a.parquet"}}, "a.parquet is no .npz and no .csv"),
        ({"trainingConfig": {"callbacks": ["EarlyStopping"]}}, "early_stopping watch the valid"),
        (
            {"trainingConfig": {"distributionStrategy": "MultiWorkerMirroredStrategy"}},
            "paceline render --for tensorflow",
        ),
        ({"trainingConfig": {"distributionStrategy": "ParameterServer"}}, "asynchronous"),
        ({"trainingConfig": {"distributionStrategy": "TPUStrategy"}}, "not tested here"),
        ({"trainingConfig": {"numReplicas": 2}}, "numReplicas is for"),
        ({"trainingConfig": {"epoch": 2}}, "epoch"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_with_its_place(tmp_path, changes, message):
    with pytest.raises(JobError, match=message):
        run_skill(
            "tensorflow-trainer", asked(tmp_path, **changes), source="request", folder=tmp_path
        )

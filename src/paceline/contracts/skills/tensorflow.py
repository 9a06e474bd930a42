"""The TensorFlow trainer's contract: check the paths, start the program, gather what it says."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from paceline.contracts.skills import need
from paceline.contracts.skills.messages.pytorch import Metrics
from paceline.contracts.skills.messages.tensorflow import Answer, Request
from paceline.contracts.skills.words import check_model_file, last_words, problem
from paceline.errors import JobError, Problem

_READ = {".npz", ".csv"}
_REFUSED = {
    "multi_worker_mirrored": "Keras 3 does not train under MultiWorkerMirroredStrategy "
    "(keras issue 20585); `paceline render --for tensorflow` writes a loop that does",
    "tpu": "TPUStrategy needs a TPU's own TensorFlow and is not tested here",
    "parameter_server": "Keras 3 does not train under ParameterServerStrategy, which is "
    "asynchronous",
}


def run(request: Request, folder: Path) -> Answer:
    """Train as asked, in a process of its own; this one imports no TensorFlow.

    Raises:
        JobError: `H033`, a path or a combination is wrong; `H032`, TensorFlow or TensorBoard is
            missing.
    """
    JobError.raise_for(_check(request, folder))
    need("tensorflow", "tensorflow")
    if "tensorboard" in request.trainingConfig.callbacks:
        need("tensorboard", "tensorboard")  # TensorFlow 2.21 no longer brings it
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-contract-") as name:
        told = Path(name) / "told.json"
        failure = _train(request, folder, told)
        said = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    history: dict[str, list[float]] = said.get("history", {})
    last = {name: values[-1] for name, values in history.items() if values}
    return Answer(
        status="error" if failure else said["status"],
        metrics=Metrics(
            trainLoss=last.get("loss"),
            valLoss=last.get("val_loss"),
            trainAccuracy=last.get("accuracy"),
            valAccuracy=last.get("val_accuracy"),
            epochsTrained=len(history.get("loss", [])),
            trainingTime=round(time.monotonic() - began, 3),
        ),
        modelPath=said.get("model", ""),
        savedModelPath=said.get("saved_model"),
        tflitePath=said.get("tflite"),
        tensorboardLogDir=said.get("tensorboard"),
        history=history,
        worldSize=said.get("world_size"),
        message=failure,
    )


def _check(request: Request, folder: Path) -> Iterator[Problem]:
    model, data, train = request.modelConfig, request.dataConfig, request.trainingConfig
    yield from check_model_file(folder / model.modelPath, "modelConfig.modelPath")
    for key, path in (("trainPath", data.trainPath), ("valPath", data.valPath)):
        if path is None:
            continue
        if Path(path).suffix not in _READ:
            yield problem(f"dataConfig.{key}", f"{path} is no .npz and no .csv", "name one")
        elif not (folder / path).is_file():
            yield problem(f"dataConfig.{key}", f"there is no file {path}", "name the samples")
    watching = {"early_stopping", "reduce_lr"} & set(train.callbacks)
    if watching and data.valPath is None:
        what = (
            f"{' and '.join(sorted(watching))} watch the validation loss, and there is no valPath"
        )
        yield problem("trainingConfig.callbacks", what, "give it, or leave them out")
    if train.distributionStrategy in _REFUSED:
        what = _REFUSED[train.distributionStrategy]
        yield problem("trainingConfig.distributionStrategy", what, "mirrored, or none")
    if train.numReplicas is not None and train.distributionStrategy != "mirrored":
        what = "numReplicas is for distributionStrategy mirrored"
        yield problem("trainingConfig.numReplicas", what, "leave it out")


def _train(request: Request, folder: Path, told: Path) -> str | None:
    """None, or why it failed."""
    command = [sys.executable, "-m", "paceline.contracts.skills.tensorflow_program", str(told)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        input=json.dumps(asdict(request)),
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and told.exists():
        return None
    return f"training ended with exit code {done.returncode}: {last_words(done.stderr)}"

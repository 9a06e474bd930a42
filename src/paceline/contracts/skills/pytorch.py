"""The PyTorch trainer's contract: check the paths, start the processes, gather what they say."""

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
from paceline.contracts.skills.messages.pytorch import Answer, Epoch, Metrics, Request
from paceline.contracts.skills.words import check_model_file, last_words, problem
from paceline.control.environment import spins
from paceline.errors import JobError, Problem

_READ_HERE = {".npz", ".csv"}


def run(request: Request, folder: Path) -> Answer:
    """Train as asked, in processes of their own; this one imports no torch.

    Raises:
        JobError: `H033`, a path or a combination is wrong; `H032`, torch is missing.
    """
    JobError.raise_for(_check(request, folder))
    need("torch", "torch")
    _check_writable(request.checkpointConfig.saveDir, folder)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-contract-") as name:
        asked, told = Path(name) / "request.json", Path(name) / "told.json"
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        failure = _train(request, folder, asked, told)
        said = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    curve = [Epoch(**each) for each in said.get("curve", [])]
    last = asdict(curve[-1]) if curve else {}
    kept = ("trainLoss", "valLoss", "trainAccuracy", "valAccuracy")
    return Answer(
        status="error" if failure else said["status"],
        metrics=Metrics(
            **{key: last.get(key) for key in kept},
            epochsTrained=said.get("epochs", 0),
            trainingTime=round(time.monotonic() - began, 3),
        ),
        checkpointPath=said.get("checkpoint", ""),
        bestCheckpointPath=said.get("best"),
        learningCurve=curve,
        worldSize=said.get("world_size"),
        message=failure,
    )


def _check(request: Request, folder: Path) -> Iterator[Problem]:
    model, data, train = request.modelPath, request.dataConfig, request.trainingConfig
    yield from check_model_file(folder / model, "modelPath")
    for key, path in (("trainPath", data.trainPath), ("valPath", data.valPath)):
        if path is not None and Path(path).suffix in _READ_HERE and not (folder / path).is_file():
            yield problem(f"dataConfig.{key}", f"there is no file {path}", "name the samples")
    resume = request.checkpointConfig.resumeFrom
    if resume is not None and not (folder / resume).is_file():
        what = f"there is no checkpoint {resume}"
        yield problem("checkpointConfig.resumeFrom", what, "name an epoch-N.pt of saveDir")
    if train.earlyStopping is not None and data.valPath is None:
        what = "early stopping watches the validation loss, and there is no dataConfig.valPath"
        yield problem("trainingConfig.earlyStopping", what, "give valPath, or leave it out")
    if data.batchSize % train.numProcesses:
        what = f"{train.numProcesses} processes do not divide a batch of {data.batchSize}"
        fix = f"batchSize {-(-data.batchSize // train.numProcesses) * train.numProcesses}"
        yield problem("dataConfig.batchSize", what, fix)


def _check_writable(name: str, folder: Path) -> None:
    """Before an epoch is trained whose checkpoint has no place.

    Raises:
        JobError: `H033`, nothing can be written there.
    """
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / name):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        what, fix = f"{name} cannot be written: {why}", "name a folder that you may write to"
        raise JobError(problem("checkpointConfig.saveDir", what, fix)) from None


def _train(request: Request, folder: Path, asked: Path, told: Path) -> str | None:
    """None, or why it failed."""
    count = request.trainingConfig.numProcesses
    program = ["-m", "paceline.runtime.epochs", str(asked), str(told)]
    if count == 1:
        command = [sys.executable, *program]
    else:
        # torchrun names a process that fails; all of them end when one does.
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [sys.executable, *launcher, *program]
    environment = dict(os.environ)
    cores = max(1, (os.cpu_count() or 1) // count)
    environment.setdefault("OMP_NUM_THREADS", str(cores))
    environment |= spins(environment)
    done = subprocess.run(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    said = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    if done.returncode == 0 and "status" in said:
        if said["world_size"] != count:
            return f"{count} processes were asked for, {said['world_size']} trained together"
        return None
    error = said.get("error") or last_words(done.stderr)
    return f"training ended with exit code {done.returncode}: {error}"

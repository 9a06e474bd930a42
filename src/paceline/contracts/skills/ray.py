"""The Ray trainer's contract, done by Ray: train, search with ASHA, look at the cluster."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.contracts.skills import need
from paceline.contracts.skills.messages.ray import Answer, Range, Request, Results
from paceline.contracts.skills.ray_cluster import (
    WORKER_BYTES,
    address_of,
    cluster_status,
    connected,
    lacking,
    memory_of,
    workers_of,
)
from paceline.contracts.skills.ray_search import run_search
from paceline.contracts.skills.ray_train import run_training
from paceline.contracts.skills.words import problem
from paceline.errors import JobError, Problem
from paceline.topology.machine import find_local_machine
from paceline.units import format_bytes

_PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow", "xgboost": "xgboost"}


def run(request: Request, folder: Path) -> Answer:
    """Do what is asked; a cluster that was started for it ends with it.

    Raises:
        JobError: `H033`, a path or a combination is wrong; `H032`, a package is missing.
    """
    JobError.raise_for(_check(request, folder))
    need("ray", '"ray[default,train,tune]"')
    if request.trainConfig is not None and request.mode != "cluster":
        package = _PACKAGES[request.trainConfig.framework]
        need(package, package)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with connected(request, folder) as failure:
        if failure is not None:
            return Answer(status="error", results=Results(), message=failure)
        status = cluster_status()
        lacks = lacking(request, status)
        if lacks is not None:
            return Answer(status="error", results=Results(), clusterStatus=status, message=lacks)
        began = time.monotonic()
        if request.mode == "cluster":
            return Answer(status="success", results=Results(), clusterStatus=status)
        act = run_training if request.mode == "train" else run_search
        return act(request, folder, status, began)


def _check(request: Request, folder: Path) -> Iterator[Problem]:
    train, tune = request.trainConfig, request.tuneConfig
    if request.mode == "cluster":
        return
    if train is None:
        yield problem("trainConfig", f"mode {request.mode} needs `trainConfig`", "add it")
    elif not (folder / train.trainerPath).is_file():
        what = f"there is no file {train.trainerPath}"
        yield problem("trainConfig.trainerPath", what, "name a Python file with train_loop(config)")
    if train is not None:
        least, most = workers_of(request)
        if least > most:
            what = f"at least {least} workers are asked for, and at most {most}"
            yield problem("trainConfig.scalingConfig", what, f"minWorkers {most} or less")
    if train is not None and not address_of(request):
        free = find_local_machine().available_bytes
        if most * WORKER_BYTES > free:
            what = f"{memory_of(most)}, and this machine has {format_bytes(free)} free"
            fix = f"{max(1, free // WORKER_BYTES)} workers or fewer, or the address of a cluster"
            yield problem("config.numWorkers", what, fix)
    if request.mode == "tune" and tune is None:
        yield problem("tuneConfig", "mode tune needs `tuneConfig`", "add it")
    if request.mode == "tune" and tune is not None:
        for name, each in tune.searchSpace.items():
            yield from _check_range(f"tuneConfig.searchSpace.{name}", each)


def _check_range(key: str, each: Range) -> Iterator[Problem]:
    if each.type in ("choice", "grid"):
        if not each.values:
            yield problem(key, f"a {each.type} needs values", '"values": [...]')
        return
    if each.min is None or each.max is None:
        yield problem(key, f"{each.type} needs min and max", '"min": 1e-5, "max": 1e-1')
    elif not each.min < each.max:
        yield problem(key, f"min {each.min:g} is not below max {each.max:g}", "exchange them")
    elif each.type == "loguniform" and each.min <= 0:
        yield problem(key, f"min {each.min:g} has no logarithm", "a min above 0, or uniform")
    elif each.type == "randint" and (each.min % 1 or each.max % 1):
        yield problem(key, "randint takes whole numbers", "whole numbers, or uniform")

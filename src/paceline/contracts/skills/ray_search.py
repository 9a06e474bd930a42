"""A search by Ray Tune, each trial of which trains on workers of its own."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contracts.skills.messages.ray import Answer, ClusterStatus, Range, Request, Results
from paceline.contracts.skills.ray_cluster import resources_of_worker, shares_cores, workers_of
from paceline.contracts.skills.ray_train import (
    failure_of,
    load_loop,
    make_trainer,
    plain,
    storage_of,
)


def run_search(request: Request, folder: Path, status: ClusterStatus, began: float) -> Answer:
    """Every trial is a function that makes a trainer: handing the trainer to the Tuner itself is
    deprecated in Ray."""
    from ray import tune

    asked = request.tuneConfig
    assert asked is not None
    assert request.trainConfig is not None
    try:
        loop = load_loop(request, folder)
        tuner = tune.Tuner(
            # A driver: its workers ask for what they need. Ray takes no empty request, and a byte
            # of memory is next to none.
            tune.with_resources(_trial(request, loop, folder), {"memory": 1}),
            param_space={name: _range(each) for name, each in asked.searchSpace.items()},
            tune_config=tune.TuneConfig(
                metric=asked.metric,
                mode=asked.mode,
                num_samples=asked.numSamples,
                max_concurrent_trials=asked.maxConcurrent or _at_once(request, status),
                scheduler=_scheduler(asked.scheduler, asked.maxReports),
            ),
            run_config=tune.RunConfig(
                name=f"tune-{int(time.time())}-{os.getpid()}",
                storage_path=storage_of(request, folder),
            ),
        )
        found = tuner.fit()
    except Exception as error:  # noqa: BLE001 - the same
        return failure_of(error, request, status, began)
    return _searched(request, found, status, began)


def _trial(request: Request, loop: Any, folder: Path) -> Callable[[dict[str, Any]], None]:
    storage = storage_of(request, folder)
    assert request.trainConfig is not None
    fixed = request.trainConfig.loopConfig

    def trial(config: dict[str, Any]) -> None:
        from ray import tune
        from ray.tune.integration.ray_train import TuneReportCallback

        name = f"trial-{tune.get_context().get_trial_id()}"
        callbacks = [TuneReportCallback()]
        make_trainer(request, loop, fixed | config, name, storage, callbacks=callbacks).fit()

    return trial


def _searched(request: Request, found: Any, status: ClusterStatus, began: float) -> Answer:
    asked = request.tuneConfig
    assert asked is not None
    ended = [each for each in found if each.error is None and asked.metric in (each.metrics or {})]
    failed = [each for each in found if each.error is not None]
    silent = len(found) - len(ended) - len(failed)
    message = None
    if failed:
        first = str(failed[0].error).strip().splitlines()[-1][:400]
        message = f"{len(failed)} of {len(found)} trials failed: {first}"
    elif silent:
        message = f"{silent} of {len(found)} trials never reported {asked.metric}"
    best = None
    if ended:
        choose = min if asked.mode == "min" else max
        best = choose(ended, key=lambda each: each.metrics[asked.metric])
    checkpoint = None if best is None else best.metrics.get("checkpoint_path")
    return Answer(
        status="error" if best is None else "partial" if message else "success",
        results=Results(
            bestConfig=None if best is None else plain(best.config),
            bestMetric=None if best is None else float(best.metrics[asked.metric]),
            numTrials=len(found),
            completedTrials=len(ended),
            worldSize=workers_of(request)[1],
        ),
        checkpointPath=checkpoint,
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=message or shares_cores(request),
    )


def _range(each: Range) -> Any:
    from ray import tune

    match each.type:
        case "choice":
            return tune.choice(each.values)
        case "grid":
            return tune.grid_search(each.values)
        case "randint":
            return tune.randint(int(each.min or 0), int(each.max or 0))
        case "uniform":
            return tune.uniform(each.min, each.max)
    return tune.loguniform(each.min, each.max)


def _scheduler(name: str, most: int) -> Any:
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if name == "fifo":
        return FIFOScheduler()
    return ASHAScheduler(max_t=most, grace_period=1, reduction_factor=3)


def _at_once(request: Request, status: ClusterStatus) -> int:
    """Trials that the cluster has room for; more would hold workers and wait for each other."""
    there = {"CPU": status.totalCpu, "GPU": status.totalGpu}
    most = workers_of(request)[1]
    rooms = [there[kind] // (most * each) for kind, each in resources_of_worker(request).items()]
    return max(1, int(min(rooms, default=1)))

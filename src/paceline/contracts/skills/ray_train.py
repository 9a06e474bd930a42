"""Train on Ray's workers: the trainer of a framework, what it reports, and how it fails."""

import contextlib
import importlib
import importlib.util
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contracts.skills.messages.ray import Answer, ClusterStatus, Request, Results
from paceline.contracts.skills.ray_cluster import resources_of_worker, shares_cores, workers_of
from paceline.contracts.skills.words import raised_in

Report = tuple[Mapping[str, Any], str | None]
"""Metrics of the last report, and the path of the newest checkpoint."""


def run_training(request: Request, folder: Path, status: ClusterStatus, began: float) -> Answer:
    assert request.trainConfig is not None
    most = workers_of(request)[1]
    name = f"train-{int(time.time())}-{os.getpid()}"
    last_report: Callable[[], Report] = lambda: ({}, None)  # noqa: E731 - until Ray has one
    try:
        loop = load_loop(request, folder)
        storage = storage_of(request, folder)
        reported, last_report = _reports()
        config = request.trainConfig.loopConfig
        result = make_trainer(request, loop, config, name, storage, callbacks=[reported]).fit()
        metrics = dict(last_report()[0] or result.metrics or {})
    except Exception as error:  # noqa: BLE001 - the program's own, or Ray's: it is the answer
        report: Report = ({}, None)
        with contextlib.suppress(Exception):  # of a cluster that is lost
            report = last_report()
        return failure_of(error, request, status, began, report)
    checkpoint = result.checkpoint
    return Answer(
        status="success",
        results=Results(metrics=plain(metrics), worldSize=most),
        checkpointPath=None if checkpoint is None else checkpoint.path,
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=shares_cores(request),
    )


def _reports() -> tuple[Any, Callable[[], Report]]:
    """A callback of the trainer, and what tells the last report that it heard.

    A result of Ray has the metrics of its last checkpoint alone. The callback is called in another
    process, maybe on another machine: an actor holds what it heard.
    """
    import ray
    import ray.train

    class Kept:
        def __init__(self) -> None:
            self.report: Report = ({}, None)

        def keep(self, metrics: Mapping[str, Any], path: str | None) -> None:
            self.report = (metrics, path or self.report[1])

        def last(self) -> Report:
            return self.report

    kept: Any = ray.remote(num_cpus=0)(Kept).remote()

    def after_report(
        self: Any, run_context: Any, metrics: Sequence[Mapping[str, Any]], checkpoint: Any
    ) -> None:
        path = None if checkpoint is None else checkpoint.path
        ray.get(kept.keep.remote(metrics[0], path))

    callback = type("Reports", (ray.train.UserCallback,), {"after_report": after_report})
    return callback(), lambda: ray.get(kept.last.remote())


def load_loop(request: Request, folder: Path) -> Callable[[dict[str, Any]], None]:
    """`train_loop` of the file. It is sent to the workers whole: they do not need the file.

    Raises:
        AttributeError: The file has none. Whatever the file itself raises.
    """
    assert request.trainConfig is not None
    path = (folder / request.trainConfig.trainerPath).resolve()
    spec = importlib.util.spec_from_file_location("paceline_contract_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[dict[str, Any]], None] = module.train_loop
    return found


def make_trainer(
    request: Request, loop: Any, config: dict[str, Any], name: str, storage: str, **more: Any
) -> Any:
    """The trainer of the framework, on as many workers as are asked for."""
    import ray.train

    assert request.trainConfig is not None
    least, most = workers_of(request)
    kinds = {"pytorch": "torch", "tensorflow": "tensorflow", "xgboost": "xgboost"}
    module = importlib.import_module(f"ray.train.{kinds[request.trainConfig.framework]}")
    names = {"pytorch": "TorchTrainer", "tensorflow": "TensorflowTrainer"}
    make = getattr(module, names.get(request.trainConfig.framework, "XGBoostTrainer"))
    return make(
        loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=request.config.useGpu,
            resources_per_worker=resources_of_worker(request),
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=request.config.maxFailures),
            **more,
        ),
    )


def storage_of(request: Request, folder: Path) -> str:
    path = request.config.storagePath
    return path if "://" in path else str((folder / path).resolve())


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can say of them."""
    return {key: each for key, each in values.items() if isinstance(each, str | int | float | bool)}


def failure_of(
    error: Exception,
    request: Request,
    status: ClusterStatus,
    began: float,
    report: Report = ({}, None),
) -> Answer:
    """The error's last line, where in the trainer's file it was raised, and what was reached."""
    assert request.trainConfig is not None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    trace = "".join(traceback.format_exception(error))
    where = raised_in(trace, request.trainConfig.trainerPath)
    return Answer(
        status="error",
        results=Results(metrics=plain(dict(report[0])) or None),
        checkpointPath=report[1],
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=f"{where}{type(error).__name__}: {said[:400]}",
    )

"""The Ray trainer's contract, done by Ray: train, search with ASHA, look at the cluster."""

import contextlib
import importlib.util
import math
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contracts.skills import need
from paceline.contracts.skills.messages.ray import Answer, ClusterStatus, Range, Request, Results
from paceline.contracts.skills.words import problem
from paceline.errors import JobError, Problem
from paceline.topology.machine import find_local_machine
from paceline.units import counted, format_bytes

_PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow", "xgboost": "xgboost"}

_TOKEN = (
    "one with token authentication, Ray's default on this machine from 2.59 on and everywhere from "
    "2.61 on, wants the same RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there: "
    "`ray get-auth-token` prints it"
)
"""Source: docs.ray.io, "Ray token authentication" and the notice of its rollout, 2026-11."""

_CONNECT_S = 10.0
"""Seconds for one TCP connection: its first packet is sent again after 1, 3 and 7 s (RFC 6298,
section 2, whose wait starts at 1 s and doubles)."""

_WORKER_BYTES = 256 * 2**20
"""Memory of a worker before it has a model. Measured: 255 MB of its own in a process that has
imported Ray Train and torch (Ray 2.60, torch 2.13 for CPUs)."""


Report = tuple[Mapping[str, Any], str | None]
"""Metrics of the last report, and the path of the newest checkpoint."""


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
    with _connected(request, folder) as failure:
        if failure is not None:
            return Answer(status="error", results=Results(), message=failure)
        status = _cluster_status()
        lacks = _lacks(request, status)
        if lacks is not None:
            return Answer(status="error", results=Results(), clusterStatus=status, message=lacks)
        began = time.monotonic()
        if request.mode == "cluster":
            return Answer(status="success", results=Results(), clusterStatus=status)
        act = _train if request.mode == "train" else _tune
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
        least, most = _workers(request)
        if least > most:
            what = f"at least {least} workers are asked for, and at most {most}"
            yield problem("trainConfig.scalingConfig", what, f"minWorkers {most} or less")
    if train is not None and not _address(request):
        free = find_local_machine().available_bytes
        if most * _WORKER_BYTES > free:
            what = f"{_memory_of(most)}, and this machine has {format_bytes(free)} free"
            fix = f"{max(1, free // _WORKER_BYTES)} workers or fewer, or the address of a cluster"
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


def _workers(request: Request) -> tuple[int, int]:
    """Fewest and most."""
    asked = request.config.numWorkers
    if request.trainConfig is None:
        return asked, asked
    scaling = request.trainConfig.scalingConfig
    most = scaling.maxWorkers or asked
    return scaling.minWorkers or most, most


def _address(request: Request) -> str | None:
    """The cluster that is asked for; None starts one on this machine."""
    return request.config.address or os.environ.get("RAY_ADDRESS")


def _memory_of(workers: int) -> str:
    needed = format_bytes(workers * _WORKER_BYTES)
    return f"{counted(workers, 'worker')} need{'s' if workers == 1 else ''} {needed} at least"


def _of_worker(request: Request) -> dict[str, float]:
    """What Ray keeps for one worker."""
    config = request.config
    gpus = config.resourcesPerWorker.gpu
    found = {"CPU": config.resourcesPerWorker.cpu}
    if config.useGpu:
        found["GPU"] = 1.0 if gpus is None else gpus
    return {name: amount for name, amount in found.items() if amount}


@contextlib.contextmanager
def _connected(request: Request, folder: Path) -> Iterator[str | None]:
    """A cluster; None, or why there is none."""
    import ray

    address = _address(request)
    # A search needs the dashboard's state API: by it Ray takes back the workers of a stopped trial.
    options: dict[str, Any] = {
        "ignore_reinit_error": True,
        "include_dashboard": request.mode == "tune",
    }
    if request.mode == "cluster":
        address = address or "auto"
    elif request.trainConfig is not None:
        options["runtime_env"] = _files(request, folder, is_here=address is None)
    if address is not None:
        options = {key: each for key, each in options.items() if key != "include_dashboard"}
        options["address"] = address
    else:
        # Here workers may share cores: more of them than cores only wait for each other.
        needed = _workers(request)[1] * _of_worker(request).get("CPU", 0)
        options["num_cpus"] = max(os.cpu_count() or 1, math.ceil(needed))
    failure = None
    try:
        _knock(address)
        ray.init(**options)
    except Exception as error:  # noqa: BLE001 - where no node starts, Ray raises it bare
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "here" if address == "auto" else f"at {address}"
        failure = (
            f"no Ray cluster answers {where}: {first} (`ray start --head` starts one; {_TOKEN})"
        )
        if address is None:
            failure = (
                f"Ray cannot start a cluster on this machine: {first} (give a short path with free "
                "space as RAY_TMPDIR, or the address of a running cluster as config.address)"
            )
    try:
        yield failure
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Connect to `host:port` once: Ray itself tries for minutes.

    Raises:
        OSError: Nothing listens there.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _files(request: Request, folder: Path, *, is_here: bool) -> dict[str, Any]:
    """So that workers find what lies beside the trainer's file; to another machine it is sent."""
    assert request.trainConfig is not None
    place = (folder / request.trainConfig.trainerPath).resolve().parent
    if not is_here:
        return {"working_dir": str(place), "excludes": [request.config.storagePath]}
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}


def _cluster_status() -> ClusterStatus:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return ClusterStatus(
        numNodes=sum(bool(node["Alive"]) for node in ray.nodes()),
        totalCpu=total.get("CPU", 0.0),
        totalGpu=total.get("GPU", 0.0),
        availableCpu=free.get("CPU", 0.0),
        availableGpu=free.get("GPU", 0.0),
    )


def _lacks(request: Request, status: ClusterStatus) -> str | None:
    """What the smallest group of workers needs and the cluster does not have; Ray would wait."""
    if request.mode == "cluster":
        return None
    import ray

    least, asked = _workers(request)[0], _of_worker(request)
    for kind, there in (("CPU", status.totalCpu), ("GPU", status.totalGpu)):
        needed = least * asked.get(kind, 0.0)
        if needed > there:
            return f"{least} workers need {needed:g} {kind}s, the cluster has {there:g}"
    memory = ray.cluster_resources().get("memory")
    if memory is not None and least * _WORKER_BYTES > memory:
        return f"{_memory_of(least)}, the cluster has {format_bytes(int(memory))}"
    return None


def _shares_cores(request: Request) -> str | None:
    """What is said of a cluster that is started here with more cores than this machine has."""
    workers, cores = _workers(request)[1], os.cpu_count() or 1
    needed = workers * _of_worker(request).get("CPU", 0.0)
    if _address(request) or needed <= cores:
        return None
    return (
        f"{counted(workers, 'worker')} ask for {needed:g} cores and share the {cores} of this "
        "machine: their time is not that of a cluster"
    )


def _loop(request: Request, folder: Path) -> Callable[[dict[str, Any]], None]:
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


def _trainer(
    request: Request, loop: Any, config: dict[str, Any], name: str, storage: str, **more: Any
) -> Any:
    """The trainer of the framework, on as many workers as are asked for."""
    import ray.train

    assert request.trainConfig is not None
    least, most = _workers(request)
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
            resources_per_worker=_of_worker(request),
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=request.config.maxFailures),
            **more,
        ),
    )


def _storage(request: Request, folder: Path) -> str:
    path = request.config.storagePath
    return path if "://" in path else str((folder / path).resolve())


def _train(request: Request, folder: Path, status: ClusterStatus, began: float) -> Answer:
    assert request.trainConfig is not None
    most = _workers(request)[1]
    name = f"train-{int(time.time())}-{os.getpid()}"
    last_report: Callable[[], Report] = lambda: ({}, None)  # noqa: E731 - until Ray has one
    try:
        loop = _loop(request, folder)
        storage = _storage(request, folder)
        reported, last_report = _reports()
        config = request.trainConfig.loopConfig
        result = _trainer(request, loop, config, name, storage, callbacks=[reported]).fit()
        metrics = dict(last_report()[0] or result.metrics or {})
    except Exception as error:  # noqa: BLE001 - the program's own, or Ray's: it is the answer
        report: Report = ({}, None)
        with contextlib.suppress(Exception):  # of a cluster that is lost
            report = last_report()
        return _failed(error, request, status, began, report)
    checkpoint = result.checkpoint
    return Answer(
        status="success",
        results=Results(metrics=_plain(metrics), worldSize=most),
        checkpointPath=None if checkpoint is None else checkpoint.path,
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=_shares_cores(request),
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


def _tune(request: Request, folder: Path, status: ClusterStatus, began: float) -> Answer:
    """Every trial is a function that makes a trainer: handing the trainer to the Tuner itself is
    deprecated in Ray."""
    from ray import tune

    asked = request.tuneConfig
    assert asked is not None
    assert request.trainConfig is not None
    try:
        loop = _loop(request, folder)
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
                storage_path=_storage(request, folder),
            ),
        )
        found = tuner.fit()
    except Exception as error:  # noqa: BLE001 - the same
        return _failed(error, request, status, began)
    return _searched(request, found, status, began)


def _trial(request: Request, loop: Any, folder: Path) -> Callable[[dict[str, Any]], None]:
    storage = _storage(request, folder)
    assert request.trainConfig is not None
    fixed = request.trainConfig.loopConfig

    def trial(config: dict[str, Any]) -> None:
        from ray import tune
        from ray.tune.integration.ray_train import TuneReportCallback

        name = f"trial-{tune.get_context().get_trial_id()}"
        callbacks = [TuneReportCallback()]
        _trainer(request, loop, fixed | config, name, storage, callbacks=callbacks).fit()

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
            bestConfig=None if best is None else _plain(best.config),
            bestMetric=None if best is None else float(best.metrics[asked.metric]),
            numTrials=len(found),
            completedTrials=len(ended),
            worldSize=_workers(request)[1],
        ),
        checkpointPath=checkpoint,
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=message or _shares_cores(request),
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
    most = _workers(request)[1]
    rooms = [there[kind] // (most * each) for kind, each in _of_worker(request).items()]
    return max(1, int(min(rooms, default=1)))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can say of them."""
    return {key: each for key, each in values.items() if isinstance(each, str | int | float | bool)}


def _failed(
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
    name = request.trainConfig.trainerPath
    frames = re.findall(r'File "(.+)", line (\d+)', "".join(traceback.format_exception(error)))
    numbers = [number for path, number in frames if Path(path).name == Path(name).name]
    where = f"{name}, line {numbers[-1]}: " if numbers else ""
    return Answer(
        status="error",
        results=Results(metrics=_plain(dict(report[0])) or None),
        checkpointPath=report[1],
        clusterStatus=status,
        trainingTime=round(time.monotonic() - began, 3),
        message=f"{where}{type(error).__name__}: {said[:400]}",
    )

"""Train a model of somebody's own epoch by epoch, as the PyTorch trainer's contract asks.

    python -m paceline.runtime.epochs REQUEST ANSWER

One process, or several under torchrun, which then share every batch. The request is JSON in the
contract's keys; rank 0 writes the answer, after every epoch, so that what was reached is known even
when a later one fails. `runtime/loop.py` is the loop of token batches with recovery in place; this
one is for models that count in epochs.
"""

import contextlib
import gc
import json
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = tuple[Tensor, ...]
"""Input and target."""
_WIDTHS = {"bf16": torch.bfloat16, "fp16": torch.float16, True: torch.bfloat16}


class Wrong(Exception):
    """Something of the request or of the model's file that a person can mend."""


@dataclass(slots=True, kw_only=True)
class Training:
    """One training, and what is told of it."""

    asked: dict[str, Any]
    rank: int
    world: int
    device: torch.device
    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler
    train_data: "Dataset[Pair]"
    val_data: "Dataset[Pair] | None"
    curve: list[dict[str, Any]] = field(default_factory=list)
    best: float = math.inf
    since_best: int = 0
    epoch: int = 0
    """Epochs done."""

    rate: float = 0.0
    """Learning rate that the last step was taken with."""

    @property
    def is_per_step(self) -> bool:
        """Whether the schedule moves at every step, and not at the end of an epoch."""
        return isinstance(self.scheduler, torch.optim.lr_scheduler.OneCycleLR)


def prepare(asked: dict[str, Any]) -> Training:
    """Model, data, optimizer and schedule, and the state of the checkpoint to go on from."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = _device()
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    wanted = asked["trainingConfig"]
    torch.manual_seed(wanted["seed"])
    own = _import(Path(asked["modelPath"]))
    load = own.get("load_data", read_samples)
    train_data = load(asked["dataConfig"]["trainPath"])
    val_path = asked["dataConfig"]["valPath"]
    val_data = None if val_path is None else load(val_path)
    if not len(train_data):
        raise Wrong(f"{asked['dataConfig']['trainPath']} has no samples")
    model: nn.Module = _build(own).to(device)
    if not any(each.requires_grad for each in model.parameters()):
        raise Wrong(f"build_model() of {asked['modelPath']} has no parameter to train")
    optimizer = _optimizer(wanted, model)
    steps = math.ceil(
        math.ceil(len(train_data) / asked["dataConfig"]["batchSize"])
        / wanted["gradientAccumulation"]
    )
    is_half = wanted["mixedPrecision"] == "fp16"
    if is_half and device.type == "cpu":
        raise Wrong("mixedPrecision fp16 needs a GPU; bf16 runs on a CPU too")
    training = Training(
        asked=asked,
        rank=rank,
        world=world,
        device=device,
        model=model,
        loss=own.get("loss") or loss_for(train_data),
        optimizer=optimizer,
        scheduler=_scheduler(wanted, optimizer, steps),
        scaler=torch.amp.GradScaler(device.type, enabled=is_half),
        train_data=train_data,
        val_data=val_data,
    )
    if asked["checkpointConfig"]["resumeFrom"] is not None:
        _resume(training, Path(asked["checkpointConfig"]["resumeFrom"]))
    if world > 1:
        training.model = DistributedDataParallel(model)
    return training


def train(training: Training, tell: Callable[[dict[str, Any]], None]) -> None:
    """Every epoch that is left. `tell` hears of each."""
    asked, wanted = training.asked, training.asked["trainingConfig"]
    folder, every = (
        Path(asked["checkpointConfig"]["saveDir"]),
        asked["checkpointConfig"]["saveEvery"],
    )
    patience = wanted["earlyStopping"]
    told: dict[str, Any] = {"world_size": training.world, "curve": training.curve}
    told |= {"status": "success", "epochs": training.epoch}
    while training.epoch < wanted["epochs"]:
        loss, accuracy = _train_epoch(training)
        if not math.isfinite(loss):
            raise Wrong(f"the loss of epoch {training.epoch + 1} is {loss}: lower learningRate")
        val_loss, val_accuracy = _evaluate(training)
        training.epoch += 1
        training.curve.append(
            {
                "epoch": training.epoch,
                "trainLoss": loss,
                "valLoss": val_loss,
                "trainAccuracy": accuracy,
                "valAccuracy": val_accuracy,
                "learningRate": training.rate,
            }
        )
        if training.rank == 0:
            print(json.dumps(training.curve[-1]), flush=True)
        is_best = val_loss is not None and val_loss < training.best - (
            patience["minDelta"] if patience else 0.0
        )
        training.since_best = 0 if is_best else training.since_best + 1
        if is_best and val_loss is not None:
            training.best = val_loss
        stops = patience is not None and training.since_best >= patience["patience"]
        is_last = stops or training.epoch == wanted["epochs"]
        told["epochs"] = training.epoch
        told["status"] = (
            "early_stopped" if stops and training.epoch < wanted["epochs"] else "success"
        )
        if training.rank == 0:
            if is_best:
                told["best"] = str(_save(training, folder / "best.pt"))
            if is_last or training.epoch % every == 0:
                told["checkpoint"] = str(_save(training, folder / f"epoch-{training.epoch}.pt"))
        tell(told)
        if stops:
            break
    tell(told)


def read_samples(path: str) -> "Dataset[Pair]":
    """Inputs as float32 and targets, from `.npz` or `.csv`."""
    if path.endswith(".npz"):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                missing = {"x", "y"} - set(arrays.files)
                if missing:
                    raise Wrong(f"{path} has no array {' and '.join(sorted(missing))}")
                x, y = arrays["x"], arrays["y"]
        except (ValueError, OSError) as error:
            raise Wrong(f"{path} cannot be read as npz: {error}") from None
    elif path.endswith(".csv"):
        try:
            table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        except (ValueError, OSError) as error:
            raise Wrong(f"{path} cannot be read as numbers with a header: {error}") from None
        if table.shape[1] < 2:
            raise Wrong(f"{path} has {table.shape[1]} column(s), and needs inputs and a target")
        x, y = table[:, :-1], table[:, -1]
        if np.array_equal(y, np.floor(y)):
            y = y.astype(np.int64)
    else:
        raise Wrong(f"{path} is neither .npz nor .csv: define load_data(path) in the model's file")
    if len(x) != len(y):
        raise Wrong(f"{path} has {len(x)} inputs and {len(y)} targets")
    if not np.isfinite(x).all():
        raise Wrong(f"{path} has inputs that are not finite")
    is_class = np.issubdtype(y.dtype, np.integer)
    targets = torch.from_numpy(y.astype(np.int64 if is_class else np.float32))
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), targets)


def loss_for(data: "Dataset[Pair]") -> Callable[[Any, Tensor], Tensor]:
    """Cross-entropy for classes, mean squared error for other numbers."""
    target: Any = data[0][1]
    target = torch.as_tensor(target)
    if not target.is_floating_point():
        return F.cross_entropy

    def squared(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.reshape(target.shape), target)

    return squared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What this rank computes of one batch."""

    samples: list[int]
    """Never empty: a rank that is left without computes sample 0, which then counts nothing."""

    num: int
    """How many of them count."""

    of_step: int
    """Samples of the whole optimizer step, over all ranks and batches."""

    ends_step: bool


def _parts(training: Training) -> list[_Part]:
    """This epoch's batches: a new order from the seed, every sample once over all ranks."""
    asked, count = training.asked, len(training.train_data)  # type: ignore[arg-type]
    seed = asked["trainingConfig"]["seed"] * 1_000_003 + training.epoch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    size, together = (
        asked["dataConfig"]["batchSize"],
        asked["trainingConfig"]["gradientAccumulation"],
    )
    found: list[_Part] = []
    for first in range(0, count, size * together):
        step = order[first : first + size * together]
        batches = [step[start : start + size] for start in range(0, len(step), size)]
        for number, batch in enumerate(batches):
            mine = batch[training.rank :: training.world]
            ends = number == len(batches) - 1
            found.append(
                _Part(samples=mine or [0], num=len(mine), of_step=len(step), ends_step=ends)
            )
    return found


def _train_epoch(training: Training) -> tuple[float, float | None]:
    """Mean loss and accuracy over the epoch's samples, as they were when trained on.

    The gradient of a step is the mean over its samples, on however many ranks they are: DDP divides
    by the ranks, so each rank's mean loss is weighted by its share of the step's samples.
    """
    model, wanted = training.model, training.asked["trainingConfig"]
    model.train()
    sums, parts = torch.zeros(3, dtype=torch.float64), _parts(training)
    batches = _loader(training, training.train_data, [part.samples for part in parts])
    for part, (inputs, targets) in zip(parts, batches, strict=True):
        inputs, targets = inputs.to(training.device), targets.to(training.device)
        waits = not part.ends_step and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            with _cast(training):
                outputs = model(inputs)
                loss = training.loss(outputs, targets)
            share = part.num * training.world / part.of_step
            training.scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]
        _count(sums, loss, outputs, targets, part.num)
        if not part.ends_step:
            continue
        if wanted["gradientClipping"] is not None:
            training.scaler.unscale_(training.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), wanted["gradientClipping"])
        training.rate = training.optimizer.param_groups[0]["lr"]
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad()
        if training.is_per_step and training.scheduler is not None:
            training.scheduler.step()
    if training.scheduler is not None and not training.is_per_step:
        training.scheduler.step()
    loss_mean, accuracy = _means(training, sums)
    assert loss_mean is not None  # there are samples
    return loss_mean, accuracy


@torch.no_grad()
def _evaluate(training: Training) -> tuple[float | None, float | None]:
    """Mean loss and accuracy over the held-out samples, each counted once."""
    if training.val_data is None:
        return None, None
    training.model.eval()
    mine = list(range(training.rank, len(training.val_data), training.world))  # type: ignore[arg-type]
    size = training.asked["dataConfig"]["batchSize"]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    model, sums = _bare(training.model), torch.zeros(3, dtype=torch.float64)
    for inputs, targets in _loader(training, training.val_data, batches):
        inputs, targets = inputs.to(training.device), targets.to(training.device)
        with _cast(training):
            outputs = model(inputs)
            loss = training.loss(outputs, targets)
        _count(sums, loss, outputs, targets, len(targets))
    return _means(training, sums)


def _count(sums: Tensor, loss: Tensor, outputs: Any, targets: Tensor, num: int) -> None:
    """Add a batch to (loss, right ones, samples); -inf right ones without classes."""
    if not num:
        return
    is_class = torch.is_tensor(outputs) and outputs.dim() == 2 and not targets.is_floating_point()
    right = float((outputs.argmax(-1) == targets).sum()) if is_class else -math.inf
    sums += torch.tensor([float(loss.detach()) * num, right, num], dtype=torch.float64)


def _means(training: Training, sums: Tensor) -> tuple[float | None, float | None]:
    if training.world > 1:
        sums = sums.to(training.device, torch.float64)
        dist.all_reduce(sums)
    loss, right, num = sums.tolist()
    if not num:
        return None, None
    return loss / num, right / num if math.isfinite(right) else None


def _loader(training: Training, data: "Dataset[Pair]", batches: list[list[int]]) -> Iterator[Pair]:
    workers = training.asked["dataConfig"]["numWorkers"]
    return iter(DataLoader(data, batch_sampler=batches, num_workers=workers))


def _cast(training: Training) -> contextlib.AbstractContextManager[Any]:
    width = _WIDTHS.get(training.asked["trainingConfig"]["mixedPrecision"])
    if width is None:
        return contextlib.nullcontext()
    return torch.autocast(training.device.type, width)


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _optimizer(wanted: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    parameters, rate = (
        [each for each in model.parameters() if each.requires_grad],
        wanted["learningRate"],
    )
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=rate),
        "adam": lambda: torch.optim.Adam(parameters, lr=rate),
        "sgd": lambda: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=rate),
    }
    return makers[wanted["optimizer"]]()


def _scheduler(
    wanted: dict[str, Any], optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    epochs, kinds = wanted["epochs"], torch.optim.lr_scheduler
    match wanted["scheduler"]:
        case "step":
            return kinds.StepLR(optimizer, step_size=max(1, epochs // 3))
        case "cosine":
            return kinds.CosineAnnealingLR(optimizer, T_max=epochs)
        case "onecycle":
            total = epochs * steps_per_epoch
            return kinds.OneCycleLR(optimizer, max_lr=wanted["learningRate"], total_steps=total)
    return None


def _save(training: Training, path: Path) -> Path:
    """Everything that goes on from: it appears under its name when it is whole."""
    scheduler = training.scheduler
    state = {
        "model": _bare(training.model).state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": training.scaler.state_dict(),
        "epoch": training.epoch,
        "best": training.best,
        "since_best": training.since_best,
    }
    part = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise Wrong(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    return path


def _resume(training: Training, path: Path) -> None:
    state = _read_checkpoint(training, path)
    try:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        if training.scheduler is not None and state["scheduler"] is not None:
            training.scheduler.load_state_dict(state["scheduler"])
        training.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:300]
        raise Wrong(f"{path} is of another model or optimizer: {why}") from None
    training.epoch, training.best = state["epoch"], state["best"]
    training.since_best = state["since_best"]
    if training.epoch >= training.asked["trainingConfig"]["epochs"]:
        raise Wrong(f"{path} has {training.epoch} epochs already: ask for more epochs")


def _read_checkpoint(training: Training, path: Path) -> dict[str, Any]:
    """What `_save` wrote."""
    try:
        state = torch.load(path, map_location=training.device, weights_only=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise Wrong(f"{path} cannot be read: {why}") from None
    except Exception:  # noqa: BLE001 - the bytes decide which one the unpickler raises
        raise Wrong(f"{path} is no checkpoint: PyTorch cannot read it") from None
    wanted = ("model", "optimizer", "scheduler", "scaler", "epoch", "best", "since_best")
    missing = [key for key in wanted if not isinstance(state, dict) or key not in state]
    if missing:
        raise Wrong(f"{path} is no checkpoint of this trainer: it has no {', '.join(missing)}")
    return dict(state)


def _import(path: Path) -> dict[str, Any]:
    """The names of the model's file."""
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:  # of this file, or of one that it imports
        where = f"{error.filename or path}, line {error.lineno}"
        raise Wrong(f"{where} is no Python: {error.msg}") from None
    except Exception as error:  # noqa: BLE001 - somebody's own code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise Wrong(f"{where}: {type(error).__name__}: {error}") from None


def _build(own: dict[str, Any]) -> nn.Module:
    build = own.get("build_model")
    if build is None:
        raise Wrong("the model's file has no build_model()")
    model = build()
    if not isinstance(model, nn.Module):
        raise Wrong(f"build_model() returned a {type(model).__name__}, and not an nn.Module")
    return model


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def main() -> None:
    """One process of a training."""
    asked_file, told_file = (Path(each) for each in sys.argv[1:])
    told: dict[str, Any] = {}
    is_first = int(os.environ.get("RANK", 0)) == 0

    def tell(news: dict[str, Any]) -> None:
        told.update(news)
        if is_first:
            part = told_file.with_suffix(".part")
            part.write_text(json.dumps(told), encoding="utf-8")
            part.replace(told_file)

    try:
        train(prepare(json.loads(asked_file.read_text(encoding="utf-8"))), tell)
    except Wrong as error:
        tell({"error": str(error)})
        sys.exit(f"paceline: {error}")
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
    if dist.is_initialized():
        # What the groups' threads still hold must go before Python does (torch 2.13 over gloo).
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

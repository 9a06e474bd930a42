"""Train a model of somebody's own epoch by epoch, as the PyTorch trainer's contract asks.

    python -m paceline.runtime.epochs REQUEST ANSWER

One process, or several under torchrun, which then share every batch. The request is JSON in the
contract's keys; rank 0 writes the answer, after every epoch, so that what was reached is known even
when a later one fails. A step is the one that a run takes (`step.py`); what is here is the epochs:
their samples, their curve and their checkpoints, without recovery in place.
"""

import gc
import json
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.determinism import seed_everything
from paceline.runtime.devices import DEVICES
from paceline.runtime.step import Trainer

Pair = tuple[Tensor, ...]
"""Input and target."""
_PRECISIONS: dict[Any, strategy.Precision] = {"bf16": "bf16", "fp16": "fp16", True: "bf16"}


class Wrong(Exception):
    """Something of the request or of the model's file that a person can mend."""


@dataclass(slots=True, kw_only=True)
class Training:
    """One training, and what is told of it."""

    asked: dict[str, Any]
    rank: int
    world: int
    trainer: Trainer
    loss: Callable[[Any, Tensor], Tensor]
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
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
    device = _device()
    transports = DEVICES["nccl" if device.type == "cuda" else "gloo"].transports
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(transports)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(transports, store=alone, rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = asked["trainingConfig"]
    seed_everything(wanted["seed"])
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
    precision = _PRECISIONS.get(wanted["mixedPrecision"], "fp32")
    if precision == "fp16" and device.type == "cpu":
        raise Wrong("mixedPrecision fp16 needs a GPU; bf16 runs on a CPU too")
    scheduler = _scheduler(wanted, optimizer, steps)
    layout = Layout(
        data=world,
        sharding="none",
        micro_batch=max(1, asked["dataConfig"]["batchSize"] // world),
        accumulation=wanted["gradientAccumulation"],
    )
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        layout=layout,
        meshes=strategy.make_meshes(layout, device.type),
        device=device,
        precision=precision,
        seed=wanted["seed"],
        clip_norm=wanted["gradientClipping"],
        scaler=strategy.LossScaler() if precision == "fp16" else None,
    )
    training = Training(
        asked=asked,
        rank=rank,
        world=world,
        trainer=trainer,
        loss=own.get("loss") or loss_for(train_data),
        scheduler=scheduler,
        train_data=train_data,
        val_data=val_data,
    )
    if asked["checkpointConfig"]["resumeFrom"] is not None:
        _resume(training, Path(asked["checkpointConfig"]["resumeFrom"]))
    trainer.model = strategy.apply(model, layout, trainer.meshes, precision=precision)
    return training


def train(training: Training, tell: Callable[[dict[str, Any]], None]) -> None:
    """Every epoch that is left. `tell` hears of each."""
    asked, wanted = training.asked, training.asked["trainingConfig"]
    kept = asked["checkpointConfig"]
    folder, every = Path(kept["saveDir"]), kept["saveEvery"]
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
        is_early = stops and training.epoch < wanted["epochs"]
        told["status"] = "early_stopped" if is_early else "success"
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


def _parts(training: Training) -> list[list[_Part]]:
    """This epoch's batches by optimizer step: a new order from the seed, every sample once over all
    ranks."""
    asked, count = training.asked, len(training.train_data)  # type: ignore[arg-type]
    seed = asked["trainingConfig"]["seed"] * 1_000_003 + training.epoch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    size = asked["dataConfig"]["batchSize"]
    found: list[list[_Part]] = []
    for first in range(0, count, size * asked["trainingConfig"]["gradientAccumulation"]):
        step = order[first : first + size * asked["trainingConfig"]["gradientAccumulation"]]
        batches = [step[start : start + size] for start in range(0, len(step), size)]
        own = [batch[training.rank :: training.world] for batch in batches]
        found.append([_Part(samples=mine or [0], num=len(mine), of_step=len(step)) for mine in own])
    return found


def _train_epoch(training: Training) -> tuple[float, float | None]:
    """Mean loss and accuracy over the epoch's samples, as they were when trained on.

    The gradient of a step is the mean over its samples, on however many ranks they are.
    """
    trainer, sums = training.trainer, torch.zeros(3, dtype=torch.float64)
    trainer.model.train()
    steps = _parts(training)
    samples = [part.samples for parts in steps for part in parts]
    batches = _loader(training, training.train_data, samples)
    for number, parts in enumerate(steps, 1 + training.epoch * len(steps)):
        training.rate = float(trainer.optimizer.param_groups[0]["lr"])
        counts = iter(part.num for part in parts)

        def loss_of(
            outputs: Tensor, targets: Tensor, counts: Iterator[int] = counts
        ) -> tuple[Tensor, int]:
            num, loss = next(counts), training.loss(outputs, targets)
            _count(sums, loss, outputs, targets, num)
            return loss * num, num

        step = trainer.begin(number, training.rate)
        step.train_on(
            islice(batches, len(parts)),
            loss_of=loss_of,
            uneven=strategy.Uneven(num_micro_batches=len(parts), num_targets=parts[0].of_step),
        )
        step.apply()
        if step.refused is not None and not step.overflowed:
            raise Wrong(f"epoch {training.epoch + 1}: {step.refused}: lower learningRate")
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
    trainer = training.trainer
    trainer.model.eval()
    mine = list(range(training.rank, len(training.val_data), training.world))  # type: ignore[arg-type]
    size = training.asked["dataConfig"]["batchSize"]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    model, sums = _bare(trainer.model), torch.zeros(3, dtype=torch.float64)
    for inputs, targets in _loader(training, training.val_data, batches):
        inputs, targets = inputs.to(trainer.device), targets.to(trainer.device)
        with strategy.autocast(trainer.precision, trainer.device, trainer.layout):
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
    sums = sums.to(training.trainer.device)
    dist.all_reduce(sums)
    loss, right, num = sums.tolist()
    if not num:
        return None, None
    return loss / num, right / num if math.isfinite(right) else None


def _loader(
    training: Training, data: "Dataset[Pair]", batches: list[list[int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    workers = training.asked["dataConfig"]["numWorkers"]
    return iter(DataLoader(data, batch_sampler=batches, num_workers=workers))


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _optimizer(wanted: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if each.requires_grad]
    rate = wanted["learningRate"]
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
    trainer, scheduler = training.trainer, training.scheduler
    state = {
        "model": _bare(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": {} if trainer.scaler is None else trainer.scaler.state_dict(),
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
        training.trainer.model.load_state_dict(state["model"])
        training.trainer.optimizer.load_state_dict(state["optimizer"])
        if training.scheduler is not None and state["scheduler"] is not None:
            training.scheduler.load_state_dict(state["scheduler"])
        scaler, saved = training.trainer.scaler, state["scaler"]
        if scaler is not None and saved:  # empty where fp16 was not asked for
            # Older checkpoints are of torch's scaler, whose number of good steps has this name.
            scaler.load_state_dict({"num_good": saved.get("_growth_tracker"), **saved})
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
        state = torch.load(path, map_location=training.trainer.device, weights_only=True)
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
        # What the groups' threads still hold must go before Python does (torch 2.13 over gloo).
        gc.collect()
        dist.barrier()
    except Wrong as error:
        tell({"error": str(error)})
        sys.exit(f"paceline: {error}")
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a model of somebody's own epoch by epoch, as the PyTorch trainer's contract asks.

    python -m paceline.runtime.epochs REQUEST ANSWER

One process, or several under torchrun, which then share every batch. The request is JSON in the
contract's keys; rank 0 writes the answer, after every epoch, so that what was reached is known even
when a later one fails. A step is the one that a run takes (`step.py`), in the order of samples that
a run has (`sampling.py`); the rest is the contract's: its files of samples, its curve and its
checkpoints, without recovery in place.
"""

import gc
import io
import json
import math
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.parallel.layout import Layout
from paceline.record.lines import write_whole
from paceline.runtime import strategy
from paceline.runtime.determinism import seed_everything
from paceline.runtime.devices import DEVICES, device_of
from paceline.runtime.samples import Pair, Wrong, load_samples, read_samples
from paceline.runtime.sampling import sample_ids
from paceline.runtime.step import Step
from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.trainer import Trainer
from paceline.units import counted

_PRECISIONS: dict[Any, strategy.Precision] = {"bf16": "bf16", "fp16": "fp16", True: "bf16"}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}


@dataclass(slots=True, kw_only=True)
class Training:
    """One training, and how far it is."""

    asked: dict[str, Any]
    trainer: Trainer
    loss: Callable[[Any, Tensor], Tensor]
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    train_data: "Dataset[Pair]"
    val_data: "Dataset[Pair] | None"
    curve: list[dict[str, Any]] = field(default_factory=list)
    best: float = math.inf
    since_best: int = 0
    epoch: int = 0
    rate: float = 0.0
    """Learning rate that the last step was taken with."""

    @property
    def is_per_step(self) -> bool:
        """Whether the schedule moves at every step, and not at the end of an epoch."""
        return isinstance(self.scheduler, torch.optim.lr_scheduler.OneCycleLR)


def prepare(asked: dict[str, Any]) -> Training:
    """Model, data, optimizer and schedule, and the state of the checkpoint to resume from."""
    device = _meet()
    wanted, data, world = asked["trainingConfig"], asked["dataConfig"], dist.get_world_size()
    seed_everything(wanted["seed"])
    own = _import(Path(asked["modelPath"]))
    load = own.get("load_data", read_samples)
    train_data = load_samples(load, data["trainPath"])
    val_data = None if data["valPath"] is None else load_samples(load, data["valPath"])
    model: nn.Module = _build(own).to(device)
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise Wrong(f"build_model() of {asked['modelPath']} has no parameter to train")
    optimizer = _OPTIMIZERS[wanted["optimizer"]](trained, lr=wanted["learningRate"])
    precision = _PRECISIONS.get(wanted["mixedPrecision"], "fp32")
    if precision == "fp16" and device.type == "cpu":
        raise Wrong("mixedPrecision fp16 needs a GPU; bf16 runs on a CPU too")
    layout = Layout(
        data=world,
        sharding="none",
        micro_batch=max(1, data["batchSize"] // world),
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
    count = len(train_data)  # type: ignore[arg-type]
    steps = math.ceil(math.ceil(count / data["batchSize"]) / layout.accumulation)
    training = Training(
        asked=asked,
        trainer=trainer,
        loss=own.get("loss") or loss_for(train_data),
        scheduler=_scheduler(wanted, optimizer, steps),
        train_data=train_data,
        val_data=val_data,
    )
    if asked["checkpointConfig"]["resumeFrom"] is not None:
        _resume(training, Path(asked["checkpointConfig"]["resumeFrom"]))
    trainer.model = strategy.apply(model, layout, trainer.meshes, precision=precision)
    return training


def _meet() -> torch.device:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = device_of(backend, int(os.environ.get("LOCAL_RANK", 0)))
    alone: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(DEVICES[backend].transports, **alone)
    return device


def train(training: Training, on_epoch: Callable[[dict[str, Any]], None]) -> None:
    """Every epoch that is left. `on_epoch` is given the answer so far after each."""
    wanted, kept = training.asked["trainingConfig"], training.asked["checkpointConfig"]
    folder, patience = Path(kept["saveDir"]), wanted["earlyStopping"]
    least = patience["minDelta"] if patience else 0.0
    answer: dict[str, Any] = {"world_size": dist.get_world_size(), "curve": training.curve}
    answer |= {"status": "success", "epochs": training.epoch}
    while training.epoch < wanted["epochs"]:
        val_loss = _one_epoch(training)
        is_best = val_loss is not None and val_loss < training.best - least
        training.since_best = 0 if is_best else training.since_best + 1
        if is_best and val_loss is not None:
            training.best = val_loss
        stops = patience is not None and training.since_best >= patience["patience"]
        is_last = training.epoch == wanted["epochs"]
        answer["epochs"] = training.epoch
        answer["status"] = "early_stopped" if stops and not is_last else "success"
        if dist.get_rank() == 0:
            if is_best:
                answer["best"] = str(_save(training, folder / "best.pt"))
            if stops or is_last or training.epoch % kept["saveEvery"] == 0:
                path = folder / f"epoch-{training.epoch}.pt"
                answer["checkpoint"] = str(_save(training, path))
        on_epoch(answer)
        if stops:
            break


def _one_epoch(training: Training) -> float | None:
    """Train and evaluate; the validation loss. A point of the curve is added."""
    loss, accuracy = _train_epoch(training)
    if loss is None or not math.isfinite(loss):
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
    if dist.get_rank() == 0:
        print(json.dumps(training.curve[-1]), flush=True)
    return val_loss


def loss_for(data: "Dataset[Pair]") -> Callable[[Any, Tensor], Tensor]:
    """Cross-entropy for classes, mean squared error for other numbers."""

    def of_classes(output: Any, target: Tensor) -> Tensor:
        try:
            return F.cross_entropy(output, target)
        except IndexError:
            num = output.shape[1] if output.dim() > 1 else 1
            raise Wrong(
                f"targets are the classes {target.min()} to {target.max()} in this batch, and the "
                f"model has {num} outputs, for 0 to {num - 1}: give it more, or number the classes "
                "from 0"
            ) from None

    def of_numbers(output: Any, target: Tensor) -> Tensor:
        if output.numel() != target.numel():
            raise Wrong(
                f"the model has {counted(output.numel() // len(target), 'output')} a sample and "
                f"{counted(target.numel() // len(target), 'target')}; targets that are no whole "
                "numbers are no classes: give it as many outputs, or define `loss` in the "
                "model's file"
            )
        return F.mse_loss(output.reshape(target.shape), target)

    is_class = not torch.as_tensor(data[0][1]).is_floating_point()
    return of_classes if is_class else of_numbers


def steps_of(training: Training, rank: int, world: int) -> list[tuple[int, list[list[int]]]]:
    """This epoch's optimizer steps: how many samples each has over all ranks, and this rank's of
    each batch, which may be none. Every sample once over all ranks, in a new order each epoch."""
    asked, count = training.asked, len(training.train_data)  # type: ignore[arg-type]
    order = sample_ids(
        training.epoch,
        range(count),
        seed=asked["trainingConfig"]["seed"],
        global_batch=count,
        num_samples=count,
    ).tolist()
    size = asked["dataConfig"]["batchSize"]
    batches = [order[start : start + size] for start in range(0, count, size)]
    num = asked["trainingConfig"]["gradientAccumulation"]
    steps = [batches[start : start + num] for start in range(0, len(batches), num)]
    return [(sum(map(len, step)), [batch[rank::world] for batch in step]) for step in steps]


def _train_epoch(training: Training) -> tuple[float | None, float | None]:
    """Mean loss and accuracy over the epoch's samples, as they were when trained on.

    The gradient of a step is the mean over its samples, on however many ranks they are.
    """
    trainer, counted = training.trainer, _Counted(training.loss)
    trainer.model.train()
    steps = steps_of(training, trainer.rank, trainer.world_size)
    # A rank that is left without a sample computes sample 0, which then counts nothing.
    own = [samples or [0] for _, parts in steps for samples in parts]
    batches = _loader(training, training.train_data, own)
    for number, (num_samples, parts) in enumerate(steps, 1 + training.epoch * len(steps)):
        training.rate = float(trainer.optimizer.param_groups[0]["lr"])
        counted.nums = iter([len(samples) for samples in parts])
        step = Step(number, trainer, training.rate)
        step.train_on(
            islice(batches, len(parts)),
            loss_of=counted,
            uneven=strategy.Uneven(num_micro_batches=len(parts), num_targets=num_samples),
        )
        step.apply()
        if step.refused is not None and not step.overflowed:
            raise Wrong(f"epoch {training.epoch + 1}: {step.refused}: lower learningRate")
        if training.is_per_step and training.scheduler is not None:
            training.scheduler.step()
    if training.scheduler is not None and not training.is_per_step:
        training.scheduler.step()
    return counted.means(trainer.device)


def _evaluate(training: Training) -> tuple[float | None, float | None]:
    if training.val_data is None:
        return None, None
    trainer, counted = training.trainer, _Counted(training.loss)
    trainer.model.eval()
    count = len(training.val_data)  # type: ignore[arg-type]
    mine = list(range(trainer.rank, count, trainer.world_size))
    size = training.asked["dataConfig"]["batchSize"]
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    strategy.evaluate(
        unwrapped(trainer.model),  # ranks have batches of their own number
        trainer.meshes,
        (
            strategy.on_device(pair, trainer.device)
            for pair in _loader(training, training.val_data, batches)
        ),
        precision=trainer.precision,
        loss_of=counted,
    )
    return counted.means(trainer.device)


class _Counted:
    """The loss as the driver takes it, and the sums of the curve: loss, right answers, samples."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        self._loss = loss
        self._sums = np.zeros(3)
        self.nums: Iterator[int] = iter(())
        """Samples that count in the batches to come; all of a batch where it ends."""

    def __call__(self, outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
        """Sum of a batch's losses, and how many samples count."""
        loss, num = self._loss(outputs, targets), next(self.nums, len(targets))
        if num:
            is_tensor = torch.is_tensor(outputs) and outputs.dim() == 2
            is_class = is_tensor and not targets.is_floating_point()
            right = float((outputs.argmax(-1) == targets).sum()) if is_class else -math.inf
            self._sums += np.array([float(loss.detach()) * num, right, num])
        return loss * num, num

    def means(self, device: torch.device) -> tuple[float | None, float | None]:
        """Loss and accuracy over all ranks; None without samples or classes. Collective."""
        sums = torch.from_numpy(self._sums).to(device)
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
    trainer = training.trainer
    state = {
        "model": unwrapped(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": {} if trainer.scaler is None else trainer.scaler.state_dict(),
        "epoch": training.epoch,
        "best": training.best,
        "since_best": training.since_best,
    }
    content = io.BytesIO()
    torch.save(state, content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError as error:
        raise Wrong(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    return path


def _resume(training: Training, path: Path) -> None:
    state = _read_checkpoint(path, training.trainer.device)
    try:
        training.trainer.model.load_state_dict(state["model"])
        _load_optimizer(training.trainer.optimizer, state["optimizer"], path)
        scaler, saved = training.trainer.scaler, state["scaler"]
        if scaler is not None and saved:  # empty where fp16 was not asked for
            scaler.load_state_dict(saved)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:300]
        raise Wrong(f"{path} is of another model or optimizer: {why}") from None
    training.epoch, training.best = state["epoch"], state["best"]
    training.since_best = state["since_best"]
    if training.epoch >= training.asked["trainingConfig"]["epochs"]:
        raise Wrong(f"{path} has {training.epoch} epochs already: ask for more epochs")
    if training.scheduler is not None:
        moves = len(steps_of(training, 0, 1)) if training.is_per_step else 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no step was taken yet
            for _ in range(training.epoch * moves):
                training.scheduler.step()


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Moments of the checkpoint, hyperparameters of the request."""
    asked = [dict(group, params=None) for group in optimizer.param_groups]
    had, wanted = (_optimizer_of(groups[0]) for groups in (state["param_groups"], asked))
    if had != wanted:
        raise Wrong(
            f"{path} has the state of optimizer {had}, and trainingConfig.optimizer is {wanted}: "
            f'ask for "optimizer": "{had}", or leave resumeFrom out'
        )
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, asked, strict=True):
        group.update(values | {"params": group["params"]})


def _optimizer_of(group: dict[str, Any]) -> str:
    """The optimizer whose hyperparameters a group has (torch 2.13)."""
    if "decoupled_weight_decay" in group:
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    return "sgd" if "nesterov" in group else "rmsprop"


def _read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except Exception:  # noqa: BLE001 - the bytes decide which one the unpickler raises
        raise Wrong(f"{path} is no checkpoint: PyTorch cannot read it") from None
    wanted = ("model", "optimizer", "scaler", "epoch", "best", "since_best")
    missing = [key for key in wanted if not isinstance(state, dict) or key not in state]
    if missing:
        raise Wrong(f"{path} is no checkpoint of this trainer: it has no {', '.join(missing)}")
    return dict(state)


def _import(path: Path) -> dict[str, Any]:
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


def main() -> None:
    asked_file, answer_file = (Path(each) for each in sys.argv[1:])
    is_first = int(os.environ.get("RANK", 0)) == 0
    answer: dict[str, Any] = {}

    def write(news: dict[str, Any]) -> None:
        answer.update(news)
        if is_first:
            write_whole(answer_file, json.dumps(answer).encode())

    try:
        train(prepare(json.loads(asked_file.read_text(encoding="utf-8"))), write)
        # What the groups' threads still hold must go before Python does (torch 2.13 over gloo).
        gc.collect()
        dist.barrier()
    except Wrong as error:
        write({"error": str(error)})
        sys.exit(f"paceline: {error}")
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

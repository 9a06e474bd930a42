"""DDP, FSDP2 or HSDP under Ray Train, as `train.json` and `ray.json` say. `python train.py`.

Reports a checkpoint every `checkpoint_every` steps to Ray's storage. When a worker or a node dies,
Ray starts the group again, with fewer workers where `ray.json` has a range, and every worker
resumes from the newest checkpoint, at the same global batch. Started again by its name after the
driver has died, it resumes from there too.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

# Every rank's words count, and count once: Ray leaves out lines that look alike, and its patch of
# print says each twice.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")

import lm
import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from train_torchrun import check, say_end, wrap


def read_options() -> dict[str, Any]:
    """`ray.json`."""
    options: dict[str, Any] = json.loads((lm.FOLDER / "ray.json").read_text())
    return options


def scaling(options: dict[str, Any]) -> ray.train.ScalingConfig:
    """How many workers, and what each has."""
    workers = options["num_workers"]
    elastic = isinstance(workers, list)
    return ray.train.ScalingConfig(
        num_workers=tuple(workers) if elastic else workers,
        use_gpu=options["use_gpu"],
        resources_per_worker=options["resources_per_worker"],
        placement_strategy=options["placement_strategy"],
        **({"elastic_resize_monitor_interval_s": options["resize_every_s"]} if elastic else {}),
    )


def storage(options: dict[str, Any]) -> str:
    """Where checkpoints go: a URL, or a folder that every node sees."""
    found = os.environ.get("RAY_STORAGE") or options["storage"] or str(Path.cwd() / "ray")
    return found if "://" in found else str(Path(found).resolve())


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, into: str) -> None:
    """This rank's part of a sharded checkpoint; Ray puts the parts together."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=into)
    if dist.get_rank() == 0:
        (Path(into) / "step.json").write_text(json.dumps(step))


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, or 0."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return int(json.loads((Path(folder) / "step.json").read_text()))


def share(samples: lm.Samples, settings: dict[str, Any], step: int, rank: int, world: int) -> Any:
    """This rank's micro-batches of a step, each with its weight.

    Any number of ranks computes the same global batch: where it does not divide it, the last ranks
    compute one more micro-batch that counts nothing, so that all take part in every reduction.
    """
    total = settings["batch"]["global"] // settings["batch"]["micro"]
    each = -(-total // world)
    for number in range(rank * each, (rank + 1) * each):
        counts = number < total
        (tokens,) = samples.micro_batches(step, number if counts else 0, total)
        yield tokens, world / total if counts else 0.0


def train_loop(changes: dict[str, Any]) -> None:
    """What every worker runs. `changes` replaces values of `train.json`, for a search."""
    settings = lm.read_settings() | changes
    torch.set_float32_matmul_precision("high" if settings["precision"] == "tf32" else "highest")
    device, rank, world = get_device(), dist.get_rank(), dist.get_world_size()
    model = wrap(lm.build(settings).to(device), settings, device)
    optimizer = lm.adamw(settings, model)
    samples, narrow = lm.Samples(settings), settings["precision"] == "bf16"
    is_replica = isinstance(model, DistributedDataParallel)
    # A single micro-batch is reduced at once; fewer ranks have several, and would hold them whole.
    syncs = settings["layout"]["reduces_every_micro_batch"] or (
        settings["batch"]["accumulation"] == 1
    )
    for step in range(resume(model, optimizer), settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        batches = list(share(samples, settings, step, rank, world))
        total = torch.zeros((), device=device)
        for number, (tokens, weight) in enumerate(batches):
            tokens, is_last = tokens.to(device), number == len(batches) - 1
            waits = is_replica and not is_last
            if not is_replica:
                model.set_requires_gradient_sync(is_last or syncs)
            cast = torch.autocast(device.type, torch.bfloat16, enabled=narrow)
            with model.no_sync() if waits else contextlib.nullcontext(), cast:
                loss = lm.loss_of(model, tokens, settings["router_loss"]) * weight
                loss.backward()
            total += loss.detach()
        if settings["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        loss_mean = float(total) / world
        if rank == 0:
            lm.say_step(step + 1, loss_mean)
        report(model, optimizer, settings, step + 1, loss_mean)
    say_end(model)


def report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    step: int,
    loss: float,
) -> None:
    """Tell Ray of a step: with a checkpoint when one is due, without in a search."""
    metrics = {"step": step, "loss": loss}
    if settings.get("report_every"):
        if step % settings["report_every"] == 0 or step == settings["steps"]:
            ray.train.report(metrics)
    elif step % settings["checkpoint_every"] == 0:
        with tempfile.TemporaryDirectory() as folder:
            save(model, optimizer, step, folder)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def connect() -> None:
    """To the cluster that is there (RAY_ADDRESS, `ray job submit`), else to one of this machine."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # a submitted job has its files already
        ray.init()
    else:
        excludes = ["ray", "checkpoints", "output.txt"]
        ray.init(runtime_env={"working_dir": str(lm.FOLDER), "excludes": excludes})


def main() -> None:
    """The driver."""
    options = read_options()
    check(lm.read_settings())
    connect()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={},
        scaling_config=scaling(options),
        run_config=ray.train.RunConfig(
            name=options["name"],
            storage_path=storage(options),
            failure_config=ray.train.FailureConfig(max_failures=options["max_failures"]),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=options["num_to_keep"]),
        ),
    )
    result = trainer.fit()
    print(f"checkpoints: {result.path}", flush=True)


if __name__ == "__main__":
    main()

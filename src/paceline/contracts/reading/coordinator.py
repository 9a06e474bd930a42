"""The coordinator's training plan: its cluster, batch and checkpoints as a job, and what is wrong
in it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose, sqrt
from typing import Any

from paceline.catalog.load import read_shipped
from paceline.contracts.reading.engineer import ASSUMED_ACCELERATOR, is_set
from paceline.contracts.reading.translation import MOST, ContractText, Translation
from paceline.contracts.stated import ASYNC, COPIES, SETTINGS
from paceline.errors import Problem

BASE_RATE, BASE_BATCH = 0.001, 64
"""The rate and batch that the contract's own rule starts from."""

COPIES_COMPRESSED = "none; copies where that is faster"
"""What a training plan says of compression where `checkpoint.compress` is auto."""

_URL = re.compile(r"[a-z0-9+:]+://\S*[^\s,;.)\]'\"]")
_FOLDER = re.compile(r"/.*?(?=[,;.]?(?:\s\(|[,;]\s|$))")
"""Where `storage` has copies go, without the words and punctuation behind it."""

_ASSUMED_STEPS = 1000
_ASSUMED_SEQ_LEN = 4096

_WORDS = {"strategy": {"approach": "text"}, "checkpoint_strategy": {"async": "yes or no"}}
_KINDS = {
    section: _WORDS.get(section, {}) | {key: kind for key, (kind, *_) in rows.items()}
    for section, rows in SETTINGS.items()
}
"""Section -> key -> its kind, of all that is read."""


def job_of_training_plan(contract: ContractText, overrides: Sequence[str]) -> Translation:
    """The job whose cluster, batch, learning rate and checkpoints a training plan says; its model
    is given by `--set`, since the plan has no place for one."""
    made = Translation(contract=contract)
    strategy, batch = _known(made, "strategy"), _known(made, "batch_configuration")
    made.set("name", "contract")
    made.set("model", {})
    if not is_set(overrides, "model"):
        made.wrong(
            "strategy",
            "a training plan does not say which model it is for",
            "give it: --set model.preset=llama-3-8b, or --set model.hf_config=config.json",
            code="J020",
        )
    made.set("data.path", "data")
    made.set("data.seq_len", _ASSUMED_SEQ_LEN)
    if not is_set(overrides, "data.seq_len"):
        made.note(f"{_ASSUMED_SEQ_LEN} tokens a sample assumed: --set data.seq_len=...")
    _cluster(made, strategy, overrides)
    _train(made, batch, overrides)
    _checkpoints(made, _known(made, "checkpoint_strategy", required=False))
    if any(
        not isinstance(section, Mapping) or section.keys() - _KINDS.get(name, {}).keys()
        for name, section in contract.value.items()
    ):
        made.note(
            "a job has settings for strategy, batch_configuration and checkpoint_strategy alone; "
            "`paceline plan --contract 004` lists under `stated` every key that it answers "
            "otherwise, and why"
        )
    return made


def _known(made: Translation, name: str, *, required: bool = True) -> dict[str, Any]:
    """A section without complaint about keys of its many versions."""
    value, keys = made.contract.value.get(name), _KINDS[name]
    if isinstance(value, dict):
        known = {name: {key: each for key, each in value.items() if key in keys}}
        narrowed = replace(made.contract, value=known)
        made = Translation(contract=narrowed, problems=made.problems)
    return made.section(name, keys, required=required)


def _cluster(made: Translation, strategy: Mapping[str, Any], overrides: Sequence[str]) -> None:
    made.set("cluster.nodes", strategy.get("nodes", 1))
    if "gpus_per_node" in strategy:
        made.set("cluster.per_node", strategy["gpus_per_node"])
    elif "total_gpus" in strategy:
        made.set("cluster.per_node", max(1, strategy["total_gpus"] // strategy.get("nodes", 1)))
    if not is_set(overrides, "cluster.accelerator"):
        made.set("cluster.accelerator", ASSUMED_ACCELERATOR)
        made.note(
            f"the plan does not say which accelerator: {ASSUMED_ACCELERATOR} assumed; "
            "--set cluster.accelerator=..."
        )


def _train(made: Translation, batch: Mapping[str, Any], overrides: Sequence[str]) -> None:
    if "total_batch_size" in batch:
        made.set("train.global_batch", batch["total_batch_size"])
    elif _has_no_batch(made) and not is_set(overrides, "train.global_batch"):
        made.wrong(
            "batch_configuration",
            "`batch_configuration.total_batch_size` is missing",
            "add it: samples in one optimizer step over all ranks",
            code="J020",
        )
    made.set("train.steps", _ASSUMED_STEPS)
    if not is_set(overrides, "train.steps"):
        made.note(f"{_ASSUMED_STEPS} steps assumed: --set train.steps=...")
    if "learning_rate" in batch:
        made.set("train.learning_rate", batch["learning_rate"])
    if "warmup_steps" in batch:
        made.set("train.warmup_steps", round(batch["warmup_steps"]))
    elif "warmup_epochs" in batch:
        made.note("warmup_epochs are not used: how long an epoch is, the plan does not say")
    if "per_gpu_batch_size" in batch:
        made.note(
            f"per_gpu_batch_size {batch['per_gpu_batch_size']} is not fixed: the plan finds the "
            "micro-batch that fits; fix it with --set layout.micro_batch=..."
        )


def _has_no_batch(made: Translation) -> bool:
    """Whether nothing is there; what is there and wrong has a problem of its own."""
    value = made.contract.value.get("batch_configuration")
    return not isinstance(value, Mapping) or value.get("total_batch_size") is None


def _checkpoints(made: Translation, stated: Mapping[str, Any]) -> None:
    """Settings of what a plan states of its checkpoints, or a note or problem with the key."""
    for name, setting, pattern, otherwise, example in (
        ("frequency", "every", r"every_(\d+)_steps?", r"every_(\d+_)?epochs?", "every_250_steps"),
        ("retention", "keep_last", r"last_(\d+)_checkpoints?", None, "last_3_checkpoints"),
    ):
        text, key = stated.get(name), f"checkpoint_strategy.{name}"
        if text is None:
            continue
        if (found := re.fullmatch(pattern, text)) and 0 < int(found[1][:16]) < MOST:
            made.set(f"checkpoint.{setting}", int(found[1]))
        elif otherwise and re.fullmatch(otherwise, text):
            made.note(f"{key} {text!r} is not used: how long an epoch is, the plan does not say")
        else:
            made.wrong(key, f"`{key}` is {text!r}, which is no setting", f"write {example}")
    storage = stated.get("storage", "")
    if place := _URL.search(storage) or _FOLDER.match(storage):
        is_url = "://" in place[0]
        made.set("checkpoint.copy_to", place[0] if is_url else f"file://{place[0]}")
        if "keep_last" in made.job["checkpoint"]:
            made.set("checkpoint.copy_keep", made.job["checkpoint"]["keep_last"])
        made.note(f"checkpoint_strategy.storage {place[0]}: {COPIES}")
    elif storage and not storage.startswith(("runs/<run>/checkpoints", "checkpoints/ on ")):
        made.note(
            f"checkpoint_strategy.storage {storage!r} is not used: give a URL such as s3://b/c"
        )
    _writing(made, stated)


def _writing(made: Translation, stated: Mapping[str, Any]) -> None:
    compression = stated.get("compression")
    if compression == "none" and "copy_to" in made.job.get("checkpoint", {}):
        made.set("checkpoint.compress", "never")
    elif compression not in (None, "none", COPIES_COMPRESSED):
        made.note(
            f"checkpoint_strategy.compression {compression!r} is not used: copies alone are "
            "compressed, with a method of their own (checkpoint.compress)"
        )
    if stated.get("async") is False:
        made.note(f"checkpoint_strategy.async false is no setting: {ASYNC}")


def check_training_plan(value: Mapping[str, Any], source: str) -> list[Problem]:
    """Where a training plan contradicts itself, or asks for what does not exist."""
    return [
        Problem(code="J023", what=what, where=f"{where}, {source}", fix=fix)
        for where, what, fix in (*_sums(value), *_rate(value), *_untrue(value))
    ]


_Finding = tuple[str, str, str]


def _numbers(section: object, *names: str) -> list[Any] | None:
    if not isinstance(section, Mapping):
        return None
    found = [section.get(name) for name in names]
    good = all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < MOST for each in found
    )
    return found if good else None


def _sums(value: Mapping[str, Any]) -> Iterator[_Finding]:
    strategy, batch = value.get("strategy"), value.get("batch_configuration")
    sizes = _numbers(strategy, "nodes", "gpus_per_node", "total_gpus")
    if sizes is not None and sizes[0] * sizes[1] != sizes[2]:
        nodes, per_node, total = sizes
        yield (
            "strategy.total_gpus",
            f"{nodes} nodes x {per_node} GPUs is {nodes * per_node}, total_gpus says {total}",
            f"set total_gpus = {nodes * per_node}",
        )
    parts = _numbers(batch, "per_gpu_batch_size", "gradient_accumulation_steps", "total_batch_size")
    if parts is None or sizes is None:
        return
    micro, accumulation, batch_size = parts
    data_ranks = _numbers(batch, "data_parallel_size")
    gpus = data_ranks[0] if data_ranks is not None else sizes[0] * sizes[1]
    kind = "GPUs" if data_ranks is None else "data ranks"
    product = micro * accumulation * gpus
    if product != batch_size:
        yield (
            "batch_configuration.total_batch_size",
            (
                f"{micro} a GPU x {accumulation} accumulated x {gpus} {kind} is {product}, "
                f"total_batch_size says {batch_size}"
            ),
            f"set total_batch_size = {product}, or change one of the factors",
        )


def _rate(value: Mapping[str, Any]) -> Iterator[_Finding]:
    batch = value.get("batch_configuration")
    size = _numbers(batch, "total_batch_size")
    rate = batch.get("learning_rate") if isinstance(batch, Mapping) else None
    if size is None or not isinstance(rate, int | float) or size[0] < 1:
        return
    if not 0 < rate < MOST:
        return
    base_rate, base_batch = _base(batch)
    linear = base_rate * size[0] / base_batch
    root = base_rate * sqrt(size[0] / base_batch)
    if any(isclose(rate, each, rel_tol=0.02) for each in (linear, root)):
        return
    implied = rate / base_rate * base_batch
    yield (
        "batch_configuration.learning_rate",
        (
            f"{rate:g} is not what a batch of {size[0]} gives: from {base_rate:g} at {base_batch} "
            f"the linear rule gives {linear:.4g} and the square root {root:.4g}; {rate:g} is the "
            f"linear rate of {implied:.4g} samples"
        ),
        (
            f"set learning_rate = {linear:.4g} for SGD or {root:.4g} for Adam(W), unless the base "
            "is another"
        ),
    )


def _base(batch: object) -> tuple[float, int]:
    """The rate and batch the plan says it scaled from, or those of the contract's rule."""
    if isinstance(batch, Mapping):
        rate, size = batch.get("base_learning_rate"), batch.get("base_batch_size")
        if isinstance(rate, float) and isinstance(size, int) and 0 < rate < 1e9 and 0 < size < MOST:
            return rate, size
    return BASE_RATE, BASE_BATCH


_FALSE: tuple[tuple[str, str, str], ...] = tuple(
    (row["text"], row["wrong"], row["write"]) for row in read_shipped("untrue.toml").values()
)
"""Text in the plan -> what is wrong with it, and what to write."""


def _untrue(value: Mapping[str, Any]) -> Iterator[_Finding]:
    for section, content in value.items():
        text = json.dumps(content, default=str)
        for sign, what, fix in _FALSE:
            if sign in text:
                yield section, what, fix
    strategy, rdma = value.get("strategy"), value.get("rdma_config")
    approach = json.dumps(strategy) if isinstance(strategy, Mapping) else ""
    uses_nccl = isinstance(rdma, Mapping) and "NCCL" in json.dumps(rdma)
    unified = "unified_memory" in json.dumps(value.get("distributed_config"))
    if uses_nccl and "MLX" in approach and unified:
        yield (
            "rdma_config",
            (
                "MLX on Apple silicon has neither NCCL nor InfiniBand; NCCL is MLX on CUDA, which "
                "has no unified memory"
            ),
            "Macs: ring, or jaccl over Thunderbolt 5; NVIDIA: NCCL, without unified_memory",
        )

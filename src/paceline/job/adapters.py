"""The adapter that a job continues from (`train.adapter.start`): a folder as peft saves it."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import JobError, Problem
from paceline.job.job import Job
from paceline.job.safetensors import stored_tensors
from paceline.job.train import AdapterSpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What peft calls them."""

NOT_READ = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "lora_bias")
"""Settings of peft that ours has none of: an adapter that sets one is another than is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAdapter:
    """A trained adapter on this machine's disk."""

    weights: Path
    config: Mapping[str, Any]
    """Fields of `adapter_config.json`."""

    where: str
    """Its place in the job, for messages."""


def alpha_of(spec: AdapterSpec) -> float:
    """The alpha that is asked for, or twice the rank."""
    return 2.0 * spec.rank if spec.alpha == "auto" else spec.alpha


def without_pair(names: Collection[str]) -> list[str]:
    """Matrices A of LoRA whose B is not among the names, and B without their A, by name.

    >>> without_pair(["q.lora_A.weight", "q.lora_B.weight", "k.lora_B.weight"])
    ['k.lora_B.weight']
    """
    return [
        name
        for name in sorted(names)
        if (one := re.search(r"\.lora_(?:embedding_)?([AB])(?=\.|$)", name))
        and f"{name[: one.start(1)]}{'BA'[one[1] == 'B']}{name[one.end(1) :]}" not in names
    ]


def start_files(job: Job) -> tuple[Path, ...]:
    """The files of the adapter that the job continues from, whether or not they are there."""
    spec = job.spec.train.adapter
    if spec is None or spec.start is None:
        return ()
    folder = (job.folder / Path(spec.start).expanduser()).resolve()
    return folder / WEIGHTS, folder / CONFIG


def find_start(job: Job) -> StartAdapter | None:
    """The adapter that the job continues from; None when it names none.

    Raises:
        JobError: `M012`, the folder has none, or one that cannot be read.
    """
    files, where = start_files(job), job.where("train.adapter.start")
    if not files:
        return None
    weights, settings = files
    folder = weights.parent
    missing = [path.name for path in files if not path.is_file()]
    wrong = f"there is no {' and no '.join(missing)}"
    if not missing:
        wrong = f"{CONFIG} is not a JSON table"
        try:
            config = json.loads(settings.read_text(encoding="utf-8"))
            if isinstance(config, dict):
                return StartAdapter(weights=weights, config=config, where=where)
        except OSError as error:
            wrong = f"{CONFIG} cannot be read: {error.strerror}"
        except (ValueError, RecursionError):
            pass
    raise JobError.of(
        code="M012",
        what=f"{folder} is no adapter of peft: {wrong}",
        where=where,
        fix=f"give a folder with {CONFIG} and {WEIGHTS}, as `save_pretrained` of peft or "
        "`paceline checkpoint convert RUN OUT --to safetensors` writes it",
    )


def check_start(job: Job, num_parameters: int) -> Iterator[Problem]:
    """Whether the adapter that the job continues from is the one that it asks for.

    Args:
        job: As read.
        num_parameters: Of the adapters that it asks for.
    """
    spec, start = job.spec.train.adapter, find_start(job)
    if spec is None or start is None:
        return
    folder, where = start.weights.parent, start.where
    if job.spec.model.pretrained is None or job.spec.model.weights == "drawn":
        what = "an adapter belongs to the weights that it was trained beside, and the model's "
        fix = "give those weights by model.pretrained, or leave train.adapter.start out"
        yield Problem(code="M013", what=f"{what}would be drawn", where=where, fix=fix)
    for field, asked, has in _pairs(spec, start.config):
        if asked != has:
            what = f"train.adapter asks for {field} {asked}, and the adapter in {folder} has {has}"
            fix = "ask for what it has, or leave train.adapter.start out"
            yield Problem(code="M013", what=what, where=where, fix=fix)
    stored = stored_tensors((start.weights,), where=where).values()
    num = sum(prod(each.shape) for each in stored)
    if num != num_parameters:
        what = f"the adapter in {folder} has {num} parameters, and the one asked for "
        fix = "ask for the rank and the targets that it has: see its adapter_config.json"
        yield Problem(code="M013", what=f"{what}{num_parameters}", where=where, fix=fix)


def _pairs(spec: AdapterSpec, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name of a setting, what is asked for, and what the adapter has."""
    yield "kind", "dora" if spec.kind == "dora" else "lora", _kind(config)
    yield "rank", spec.rank, config.get("r")
    yield "alpha", alpha_of(spec), config.get("lora_alpha")
    is_rslora = bool(config.get("use_rslora"))
    yield "scaling", spec.scaling, "rslora" if is_rslora else "classic"
    yield from ((name, None, config.get(name) or None) for name in NOT_READ)


def _kind(config: Mapping[str, Any]) -> str:
    kind = str(config.get("peft_type", "no peft_type")).lower()
    return "dora" if kind == "lora" and config.get("use_dora") else kind

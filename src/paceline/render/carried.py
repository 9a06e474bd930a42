"""Which settings of a job reach an engine's files, and what is said of the others.

Every engine's module names in `CARRIES` what its files say. What a job asks for beyond that is a
gap, whoever wrote the engine and whenever the setting came: nothing is dropped in silence.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import yaml

from paceline.catalog.load import read_shipped
from paceline.job import Job
from paceline.job.data_rules import WITH_ANSWERS, objective_of
from paceline.job.engine import ENGINE_NAMES
from paceline.job.non_defaults import fields_of, settings_asked
from paceline.job.pretrained import loads_weights
from paceline.render.engine import Gap

PLANNED = frozenset(
    {
        *("name", "layout", "plan", "engine", "engine_version", "model.decoder", "model.preset"),
        *("model.hf_config", "model.size", "model.factory", "model.weights"),
        *("cluster.accelerator", "cluster.nodes", "cluster.per_node"),
        *(
            "cluster.memory",
            "cluster.host_memory",
            "cluster.network",
            "cluster.rdma",
            "cluster.mlx_backend",
            "cluster.network_kind",
            "cluster.topology",
            "cluster.catalog",
        ),
        *("data.seq_len", "train.global_batch", "train.precision"),
    }
)
"""What makes the plan, by key or section. An engine's own gaps say what of a plan it lacks."""

OF_PROGRAM = frozenset(
    {
        *("data.path", "data.corpus", "train.steps", "train.learning_rate", "train.warmup_steps"),
        *("train.schedule", "train.final_learning_rate", "train.weight_decay", "train.clip_norm"),
        *("train.seed", "train.betas", "train.eps", "train.decay_steps"),
        *("checkpoint.every", "checkpoint.keep_last"),
    }
)
"""What the example programs read from `train.json` and do."""

OF_EXAMPLE = OF_PROGRAM | {"data.kind", "model.tokenizer"}
"""What every example program does: also tokens of a file, or of a tokenizer."""

OF_TORCH = OF_EXAMPLE | {
    *("model.pretrained", "model.revision", "train.router_loss", "train.attention"),
}
"""What those of PyTorch do, whose model transformers builds."""

OF_DDP = OF_TORCH | {"train.bucket"}
"""What those with PyTorch's DistributedDataParallel do as well."""

EVERYTHING = frozenset({""})
"""All settings, for files that start no training: no setting is lost in them."""

PLACES = ("ssh", "slurm", "cloud", "ray", "kubernetes")
"""Sections of one place each."""

_NEVER_DONE: Mapping[str, Any] = {
    "data.held_out": 0,
    "checkpoint.compress": "never",
    "recovery.shrink": False,
    "recovery.spares": 0,
    "recovery.state": "checkpoint",
    "recovery.fingerprint_every": 0,
    "recovery.snapshot_every": 0,
    "recovery.snapshot_peers": False,
}
"""Values that ask for nothing: files that do not carry the key keep to them."""

_WITHOUT: Mapping[str, tuple[str, str]] = {
    key: (why, nearest)
    for key, (why, nearest) in read_shipped("not_carried.toml")["without"].items()
}
"""Key or section -> why files lack it, and what comes nearest."""


def covers(names: Collection[str], key: str) -> bool:
    """Whether a key, or the section that it is in, is among the names.

    >>> covers({"ssh"}, "ssh.port"), covers({"ssh.port"}, "ssh.hosts")
    (True, False)
    """
    section = key.partition(".")[0]
    return "" in names or key in names or section in names


def needs(job: Job) -> Iterator[Gap]:
    """A refusal for each setting without which something else would be trained."""
    model, data = job.spec.model, job.spec.data
    if loads_weights(job):
        yield Gap(
            what=f"the trained weights of {model.pretrained}",
            where="model.pretrained",
            why="these files have the model's sizes, and start from drawn weights",
            nearest=None,
            fix="`paceline run`, or model.weights: drawn for the files without them",
        )
    if data.corpus == "mock":
        yield Gap(
            what="data.corpus mock",
            where="data.corpus",
            why="only Megatron generates mock samples",
            nearest=None,
            fix="set data.path to your own files"
            + ("" if ENGINE_NAMES[job.spec.engine].is_megatron else "; or set engine to megatron"),
        )
    if data.kind in WITH_ANSWERS:
        yield Gap(
            what=f"data.kind {data.kind}",
            where="data.kind",
            why="these files train on every token of plain text",
            nearest=None,
            fix="`paceline run`",
        )
    if data.sources is not None:
        yield Gap(
            what=f"data.sources ({len(data.sources)})",
            where="data.sources",
            why="these files read data.path or data.corpus",
            nearest=None,
            fix="`paceline run`, or data.path",
        )


def left_out(job: Job, carries: Collection[str], said: Collection[str]) -> Iterator[Gap]:
    """A gap for each setting that the job asks for and the files do not carry.

    Args:
        job: Its settings that are not at their defaults.
        carries: Keys and sections that the engine's files carry.
        said: Keys of which the engine's own gaps say something.
    """
    other_places: dict[str, list[str]] = {}
    own = job.spec.kubernetes.script if covers(carries, "kubernetes.script") else None
    # Of data.kind the example programs have text and tokens alone.
    read = carries if "" in carries else set(carries) - {"data.kind"}
    needed = [gap for gap in needs(job) if gap.where not in said and not covers(read, gap.where)]
    yield from (gap if own is None else replace(gap, nearest=f"what {own} does") for gap in needed)
    said = {*said, *(gap.where for gap in needed)}
    for key, value in settings_asked(job.spec).items():
        if covers(PLANNED, key) or covers(carries, key) or key in said:
            continue
        if key in _NEVER_DONE and value == _NEVER_DONE[key]:
            continue
        if key == "train.objective" and objective_of(job.spec) == "next_token":
            continue  # what every engine's loss is
        section = key.partition(".")[0]
        if section in PLACES and not any(name.startswith(f"{section}.") for name in carries):
            other_places.setdefault(section, []).append(key)
            continue
        nothing = ("these files have no setting for it", "it is ignored")
        why, nearest = _WITHOUT.get(key) or _WITHOUT.get(section) or nothing
        yield Gap(
            what=f"{key}: {_short(value)}",
            where=key,
            why=why,
            nearest=nearest,
            fix=f"leave {key} out, or start the job with `paceline run`, which has it"
            if section not in PLACES
            else f"leave {key} out",
        )
    for section, keys in other_places.items():
        yield Gap(
            what=f"the section {section} ({', '.join(key.partition('.')[2] for key in keys)})",
            where=section,
            why="it is for another place or engine",
            nearest="the files start the ranks without it",
        )


def _short(value: Any) -> str:
    """As a job file has it, on one line; of sections what is not at its default."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=10**6)
    text = text.removesuffix("...\n").strip()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if not is_dataclass(value):
        return value
    fields = fields_of(type(value)).items()
    given = {name: getattr(value, name) for name, field in fields}
    return {
        name: _plain(given[name])
        for name, field in fields
        if field.is_required() or given[name] != field.get_default(call_default_factory=True)
    }

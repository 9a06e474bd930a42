"""Which settings of a job reach an engine's files, and what is said of the others.

Every engine's module names in `CARRIES` what its files say. What a job asks for beyond that is a
gap, whoever wrote the engine and whenever the setting came: nothing is dropped in silence.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import yaml

from paceline.job import Job
from paceline.job.asked import fields_of, settings_asked
from paceline.job.data_fields import WITH_ANSWERS, objective_of
from paceline.job.pretrained import loads_weights
from paceline.render.engine import Gap

PLANNED = frozenset(
    {
        *("name", "layout", "plan", "engine", "model.decoder", "model.preset"),
        *("model.hf_config", "model.size", "model.factory", "model.weights"),
        *("cluster.accelerator", "cluster.nodes", "cluster.per_node"),
        *("cluster.memory", "cluster.network", "cluster.catalog"),
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

OF_DDP = frozenset({"train.bucket"})
"""What those with PyTorch's DistributedDataParallel do as well."""

EVERYTHING = frozenset({""})
"""Of files that start no training: nothing of it is lost in them."""

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
    "cluster.rendezvous_port": (
        "the port is said where the ranks are started",
        "the engine's usual port, or what its launch script takes from the environment",
    ),
    "model.pretrained": ("the model has its sizes", "drawn weights, as model.weights: drawn asks"),
    "model.revision": ("only sizes are taken from there", "the sizes are this revision's"),
    "model.tokenizer": ("nothing in these files makes tokens of text", "tokens as the engine's"),
    "model.chat_template": (
        "no conversation is written as text",
        "what the engine reads, as it is",
    ),
    "data": ("no rows are read, and nothing is prepared", "what the engine reads, as it is"),
    "data.held_out": ("nothing is evaluated while it trains", "nothing is held out by this share"),
    "train.bucket": ("nothing in these files sets it", "buckets as the engine has them"),
    "train.static_graph": (
        "DDP (torch 2.13) fails with it where micro-batches are accumulated: it is not promised",
        "every step's graph is looked at, as ever: the same numbers",
    ),
    "train.loss_chunk": (
        "the engine computes its loss in its own way",
        "the engine's own loss, and the memory that its logits take",
    ),
    "train.router_loss": (
        "the engine has a balancing loss of its own, or none",
        "whatever the engine adds for routed experts",
    ),
    "train.max_refused_steps": (
        "the ranks take no vote on a step",
        "whatever the engine does with losses that are not finite, however many there are",
    ),
    "train.powersgd_rank": ("gradients are not sent so", "as if it were not there"),
    "train.powersgd_start": ("gradients are not sent so", "as if it were not there"),
    "checkpoint.keep_every": ("nothing chooses checkpoints by their step", "as without it"),
    "checkpoint.keep_best": ("there is no held-out loss to choose by", "as without it"),
    "checkpoint": ("nothing here copies checkpoints in the background", "as without it"),
    "evaluate.patience": ("nothing ends the run early", "all of its steps"),
    "evaluate": (
        "nothing is evaluated while it trains",
        "no held-out loss: evaluate the checkpoints afterwards",
    ),
    "recovery": (
        "Paceline's agents do it, and these files start none",
        "what the engine itself does when a rank fails",
    ),
    "drill": ("faults are injected by Paceline's own workers", "nothing is broken on purpose"),
    "alerts": (
        "Paceline's controller judges them, and these files start none",
        "the rules over the record of a run: `paceline alerts RUN`",
    ),
    "metrics": ("the ranks print their losses and write no event files", "what is printed"),
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
            why="only Megatron makes samples up",
            nearest=None,
            fix="data.path, or data.corpus: python-stdlib",
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
    needed = [gap for gap in needs(job) if gap.where not in said and not covers(carries, gap.where)]
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
        nothing = ("nothing in these files says it", "as if the job left it out")
        why, nearest = _WITHOUT.get(key) or _WITHOUT.get(section) or nothing
        yield Gap(
            what=f"{key}: {_short(value)}",
            where=key,
            why=why,
            nearest=nearest,
            fix=f"leave {key} out; `paceline run` does it"
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

"""torchtitan's TOML: degrees, batches and precision that contradict each other."""

import difflib
from collections.abc import Iterator, Mapping
from math import gcd, prod

from paceline.catalog.load import read_shipped
from paceline.check.finding import Finding
from paceline.check.lint.configs.bf16 import bf16_finding
from paceline.check.lint.configs.known_values import TORCHTITAN, check_values
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.megatron_arguments import bubble
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.context import Context
from paceline.check.lint.gpus import lacks_bf16
from paceline.check.lint.words import words_of

SECTIONS = words_of("torchtitan", "sections")
PARALLELISM = words_of("torchtitan", "parallelism")
TRAINING = words_of("torchtitan", "training")
"""Fields of torchtitan's job_config.py, 0.1 to 0.2."""


def is_torchtitan(config: Marked) -> bool:
    """Whether a TOML text is torchtitan's."""
    sections = {name for name, value in config.entries() if isinstance(value.value, dict)}
    return "training" in sections and bool(
        sections & {"parallelism", "activation_checkpoint", "job", "lr_scheduler"}
    )


def check_torchtitan(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    """Everything the file shows, alone and on the machines of the context."""
    yield from _check_keys(path, config)
    yield from check_values(path, config, TORCHTITAN)
    yield from _check_degrees(path, config, context)
    yield from _check_batches(path, config, context)
    precision = config.at("training", "mixed_precision_param") or config.at("training", "dtype")
    gpu = context.gpu
    if precision is not None and precision.text() == "bfloat16" and gpu and lacks_bf16(gpu):
        yield bf16_finding(path, precision.line, "bfloat16", gpu)
    folder = config.at("checkpoint")
    if folder is not None and folder.false("enable") and config.number("training", "steps"):
        return


def _check_keys(path: str, config: Marked) -> Iterator[Finding]:
    """Words that are nearly torchtitan's; its models may bring sections of their own."""
    for name, value in config.entries():
        near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.8)
        if name not in SECTIONS and near and isinstance(value.value, dict):
            yield found(
                "config-unknown-key",
                ERROR,
                path,
                value.line,
                f"torchtitan has no section [{name}]",
                fix=f"write [{near[0]}]",
            )
    for section, known in (("parallelism", PARALLELISM), ("training", TRAINING)):
        inside = config.at(section)
        for name, value in inside.entries() if inside is not None else ():
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if name not in known and near:
                yield found(
                    "config-unknown-key",
                    ERROR,
                    path,
                    value.line,
                    f"[{section}] has no key {name}",
                    fix=f"write {near[0]}",
                )


def _check_degrees(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    split = config.at("parallelism")
    if split is None:
        return
    names = (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
    )
    degrees = {name: split.number(name) for name in names}
    for name in (*names, "expert_parallel_degree"):
        degree = split.at(name)
        if degree is None or degree.value is None:
            continue
        number, lowest = degree.number(), -1 if name == "data_parallel_shard_degree" else 1
        if number is None or number < lowest or number == 0:
            yield found(
                "config-unknown-key",
                ERROR,
                path,
                degree.line,
                f"{name} is {degree.text()}: it has to be a whole number from 1 on",
                fix=f"{name} = 1"
                + (" or more, or -1 for what is left" if lowest < 0 else " where nothing is split"),
            )
    given = [value for value in degrees.values() if value is not None]
    open_ones = [name for name, value in degrees.items() if value == -1]
    if degrees["data_parallel_shard_degree"] is None:
        open_ones.append("data_parallel_shard_degree")  # -1 is its default
    world, product = context.num_processes, prod(value for value in given if value > 0)
    place = next((split.at(name) for name in reversed(names) if split.at(name)), split)
    line = place.line if place is not None else split.line
    if world is not None and (product != world if not open_ones else world % product):
        said = " x ".join(
            f"{name.removesuffix('_degree')} {value}"
            for name, value in degrees.items()
            if value is not None and value > 1
        )
        yield found(
            "divisibility",
            ERROR,
            path,
            line,
            f"{said or 'the degrees'} is {product}, and the job has {world} ranks",
            fix="data_parallel_shard_degree = -1 takes what is left, where the others divide it",
        )
    tensor, per_node = split.at("tensor_parallel_degree"), context.gpus_per_node or context.devices
    number = tensor.number() if tensor is not None else None
    if tensor is not None and number is not None and per_node is not None and number > per_node:
        yield found(
            "tp-across-nodes",
            WARNING,
            path,
            tensor.line,
            f"tensor parallel {number} spans nodes of {per_node} GPUs",
            fix=f"tensor_parallel_degree = {per_node} at most",
        )
    shape = _shape(config)
    if tensor is not None and number is not None and number > 1 and shape is not None:
        heads, kv_heads = shape
        for many, what in ((heads, "attention heads"), (kv_heads, "key and value heads")):
            if many % number:
                yield found(
                    "divisibility",
                    ERROR,
                    path,
                    tensor.line,
                    f"tensor parallel {number} does not divide the model's {many} {what}",
                    fix=f"tensor_parallel_degree = a divisor of {gcd(heads, kv_heads)}",
                )
                break
    expert = split.at("expert_parallel_degree")
    experts = expert.number() if expert is not None else None
    shard, cut = (
        degrees["data_parallel_shard_degree"] or -1,
        degrees["context_parallel_degree"] or 1,
    )
    if expert is not None and experts and experts > 1 and shard > 0 and (shard * cut) % experts:
        yield found(
            "divisibility",
            ERROR,
            path,
            expert.line,
            f"expert parallel {experts} does not divide the {shard * cut} ranks that shard",
            fix=f"a divisor of {shard * cut}",
        )


def _shape(config: Marked) -> tuple[int, int] | None:
    """Heads, and heads of keys and values, where the flavour is one of torchtitan's own."""
    name, flavor = config.text("model", "name"), config.text("model", "flavor")
    found = _HEADS.get(name or "", {}).get(flavor or "")
    return None if found is None else (found[0], found[1])


_HEADS: Mapping[str, Mapping[str, list[int]]] = read_shipped("software.toml")["torchtitan"]["heads"]
"""Heads and heads of keys and values of torchtitan's flavours: torchtitan/models/*/__init__.py of
0.3.0, llama4 of 0.2.0. Latent attention has a key and a value for each head."""


def _check_batches(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    split, training = config.at("parallelism"), config.at("training")
    if training is None:
        return

    def degree(name: str) -> int:
        number = split.number(f"{name}_parallel_degree") if split is not None else None
        return number if number is not None and number > 0 else 1

    local = training.number("local_batch_size") or training.number("batch_size")
    stages = degree("pipeline")
    micro_at = split.at("pipeline_parallel_microbatch_size") if split is not None else None
    micro = (micro_at.number() if micro_at is not None else None) or 1
    if stages > 1 and local is not None and split is not None:
        place = split.at("pipeline_parallel_degree") or split
        if local % micro:
            yield found(
                "divisibility",
                ERROR,
                path,
                (micro_at or place).line,
                f"pipeline_parallel_microbatch_size {micro} does not divide batch {local}",
                fix=f"a divisor of {local}",
            )
        else:
            schedule = split.text("pipeline_parallel_schedule") or "1F1B"
            chunks = 2 if "Interleaved" in schedule or "ZeroBubble" in schedule else 1
            if "ZeroBubble" not in schedule and "ZBV" not in schedule:
                yield from bubble(path, place.line, stages, local // micro, chunks)
    length_at = training.at("seq_len")
    length = length_at.number() if length_at is not None else None
    parts = degree("tensor") * (2 * degree("context") if degree("context") > 1 else 1)
    if length_at is not None and length is not None and length % parts:
        yield found(
            "divisibility",
            ERROR,
            path,
            length_at.line,
            f"seq_len {length} is no multiple of {parts}, tensor {degree('tensor')} x 2 x context "
            f"{degree('context')}",
            fix=f"seq_len = {-(-length // parts) * parts}",
        )
    whole_at, world = training.at("global_batch_size"), context.num_processes
    whole = whole_at.number() if whole_at is not None else None
    others = degree("tensor") * stages * degree("context")
    shard = (split.number("data_parallel_shard_degree") if split is not None else None) or -1
    copies = (split.number("data_parallel_replicate_degree") if split is not None else None) or 1
    data = shard * copies if shard > 0 else world // others if world else 0
    if shard < 0 and world and world % others:
        data = 0  # said above; which data ranks there would be is open
    if whole_at is not None and whole and whole > 0 and local and data and whole % (local * data):
        yield found(
            "divisibility",
            ERROR,
            path,
            whole_at.line,
            f"global batch {whole} is no multiple of {local} x {data} data ranks",
            fix=f"a multiple of {local * data}",
        )
    recompute = config.text("activation_checkpoint", "mode")
    flavor = config.text("model", "flavor") or ""
    if recompute == "none" and any(big in flavor for big in ("13B", "32B", "70B", "405B")):
        mode = config.at("activation_checkpoint", "mode")
        yield found(
            "no-gradient-checkpointing",
            INFO,
            path,
            mode.line if mode else 1,
            f"{flavor} without activation recomputation",
        )

"""What torchtitan 0.3 lacks of a plan."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES
from paceline.parallel.abilities import abilities_of
from paceline.plan import Plan
from paceline.profile import DecoderShape, ModelProfile
from paceline.render.device import accelerator_refusals
from paceline.render.engine import ANY_MODEL, Gap
from paceline.render.model import config_of
from paceline.render.shared_gaps import (
    every_block_gaps,
    loop_gaps,
    precision_gaps,
    schedule_gaps,
)

VERSION = ENGINE_NAMES["torchtitan"].planned
"""Whose configuration is written."""

_PRECISIONS = {
    "fp16": ("torchtitan has no loss scaler", None),
    "tf32": ("these files set no flag of PyTorch's", "float32: slower"),
}
"""Precision that it lacks -> why, and what comes nearest."""


def is_torchtitan(job: Job) -> bool:
    """Whether the job is planned for torchtitan."""
    return job.spec.engine == "torchtitan"


def titan_gaps(plan: Plan, job: Job) -> list[Gap]:
    """All of it; those without a nearest refuse the plan."""
    return [*_refusals(plan, job), *_layout_gaps(plan), *_training_gaps(plan, job)]


def _refusals(plan: Plan, job: Job) -> Iterator[Gap]:
    yield from accelerator_refusals(
        plan, uses=abilities_of("torchtitan").backends, why="torchtitan trains on GPUs"
    )
    yield from model_gaps(plan.profile, plan.decoder, config_of(job))
    yield from precision_gaps(plan, _PRECISIONS)
    if plan.precision == "fp8" and registered(config_of(job)):
        yield Gap(
            what=f"{plan.profile.name} in fp8",
            where="train.precision",
            why="torchtitan's float8 converters were not tried with gpt-oss's experts",
            nearest=None,
            fix="train.precision: bf16",
        )


def model_gaps(
    profile: ModelProfile, shape: DecoderShape | None, config: Mapping[str, Any]
) -> Iterator[Gap]:
    """A model that these files do not describe, whatever the layout."""
    is_known = _is_qwen(profile, config) or registered(config)
    if not is_known and (shape is None or shape.qkv_bias):
        module = _MODULES.get(str(config.get("model_type")))
        other = "" if module else "; torchtitan 0.3 has no module for it"
        yield Gap(
            what=f"the model {profile.name}",
            where="model",
            why=f"these files describe models of Llama's shape, of Qwen3's, and gpt-oss{other}",
            nearest=None,
            engines=ANY_MODEL,
            fix=f"start torchtitan's own --module {module} yourself, which Paceline does not plan"
            if module
            else "",
        )
    if shape is not None and shape.head_dim * shape.heads != shape.hidden:
        yield Gap(
            what=f"heads of {shape.head_dim} in a model {shape.hidden} wide",
            where="model",
            why="torchtitan's Llama has heads of width / heads",
            nearest=None,
            engines=ANY_MODEL,
        )


_MODULES = {
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "llama": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
}
"""`model_type` -> the module of its family: models/ of torchtitan 0.3.0. It has kimi_k2_7, flux and
muse_glimmer besides."""

_GPT_OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
}
"""What models/gpt_oss/__init__.py of 0.3.0 has in all its sizes but the one for tests, in the words
of config.json."""

_FLAVORS = {(24, 32): "20b", (36, 128): "120b"}
"""Layers and experts -> the name of a size of gpt-oss."""


def registered(config: Mapping[str, Any]) -> str:
    """Name of a gpt-oss in torchtitan's registry; empty for every other model."""
    sizes = config.get("num_hidden_layers", 0), config.get("num_local_experts", 0)
    is_one = config.get("model_type") == "gpt_oss"
    is_one = is_one and all(config.get(key) == value for key, value in _GPT_OSS.items())
    return _FLAVORS.get(sizes, "") if is_one else ""


def _is_qwen(profile: ModelProfile, config: Mapping[str, Any]) -> bool:
    """Whether torchtitan's Qwen3 is the model: models/qwen3/__init__.py of 0.3.0 has the epsilon,
    and a router whose weights add up to 1."""
    block = profile.blocks[0]
    return (
        config.get("model_type") in ("qwen3", "qwen3_moe")
        and len(profile.blocks) == 1
        and block.vector_parameters == 2 * (block.hidden + block.head_dim)
        and not block.window
        and not block.shared_ffn
        and config.get("rms_norm_eps") == _QWEN_EPSILON
        and (not block.experts or bool(config.get("norm_topk_prob")))
        and not config.get("rope_scaling")
    )


_QWEN_EPSILON = 1e-6


def _layout_gaps(plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    if layout.sharding == "zero1" and layout.data * layout.context > 1:
        yield Gap(
            what="ZeRO-1",
            where="layout.sharding",
            why="fully_shard has no way to shard optimizer state alone",
            nearest="ZeRO-2: gradients are sharded too, the same numbers in less memory",
            fix="layout.sharding: zero2",
        )
    if layout.sharding == "none" and layout.context > 1:
        yield Gap(
            what=f"whole parameters on {layout.context} context ranks",
            where="layout.sharding",
            why="torchtitan shards parameters over the context ranks",
            nearest="parameters sharded over them: less memory, more gathering",
            fix="layout.sharding: full",
        )
    shards = layout.sharding in ("full", "hybrid") and layout.data * layout.context > 1
    is_late = layout.accumulation > 1 and not layout.reduce_every_micro_batch
    if shards and is_late and layout.pipeline == 1:
        yield Gap(
            what="gradients reduced once a step",
            where="layout.sharding",
            why="torchtitan reduces them after every micro-batch",
            nearest="more is sent, and only a shard of the gradients is held",
            fix="engine: torchtitan, so that memory and time are torchtitan's",
        )
    if layout.context > 1 and plan.attention == "flash":
        yield Gap(
            what=f"attention flash over {layout.context} context ranks",
            where="train.attention",
            why="torchtitan's varlen attention takes whole samples (models/llama3/model.py)",
            nearest=None,
            fix="train.attention: flex",
        )
    if layout.context > 1:
        yield Gap(
            what=f"context {layout.context} as {layout.context_kind}",
            where="layout.context",
            why="torchtitan's attention (flex) gathers keys and values over the context ranks",
            nearest="gathered: the same numbers, more memory while a block attends",
        )
    yield from every_block_gaps(plan, "torchtitan")
    lacks = f"torchtitan {VERSION} is not planned with it"
    yield from schedule_gaps(plan, "torchtitan", lacks, None)
    if layout.offload != "none" and not (layout.offload == "cpu" and layout.offload_parameters):
        yield Gap(
            what=f"optimizer state on {layout.offload}",
            where="layout.offload",
            why="torchtitan offloads parameters and gradients with it, to the host's memory",
            nearest="all three in the host's memory: slower",
        )


def _training_gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    spec = job.spec
    yield from loop_gaps(
        job,
        "torchtitan",
        adapters="`paceline run`, or --for accelerate with your own script",
        optimizers=("adamw",),
        why_optimizers="these files name AdamW",
        wires=("none",),
        why_wires="torchtitan reduces in float32 only",
    )
    if spec.checkpoint.keep_last == 1:
        yield Gap(
            what="only one checkpoint kept",
            where="checkpoint.keep_last",
            why="torchtitan keeps two at least",
            nearest="the newest two",
        )
    is_ours = is_torchtitan(job)
    if ("train", "compile") in job.lines and not spec.train.compile and is_ours:
        yield Gap(
            what="blocks that are not compiled (train.compile: false)",
            where="train.compile",
            why="torchtitan is planned with compiled blocks",
            nearest="compiled blocks",
            fix="leave train.compile out",
        )
    if not (is_ours and isinstance(spec.data.path, str)):
        yield Gap(
            what="the job's data (data.path, data.corpus, data.sources)",
            where="data",
            why="torchtitan reads rows with a column `text`, or data sets that it knows by name",
            nearest="the data set DATASET (c4 where it is not set), at DATASET_PATH if that is set",
            fix="engine: torchtitan and data.path: one folder of such rows",
        )
    if not (is_ours and spec.model.tokenizer not in ("auto", "bytes")):
        yield Gap(
            what="the tokenizer",
            where="model.tokenizer",
            why="torchtitan reads text through one, and the job names none for it",
            nearest="HF_ASSETS, a folder with its files; the vocabulary must be the model's",
            fix="engine: torchtitan and model.tokenizer: that folder",
        )

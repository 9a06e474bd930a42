"""Megatron Bridge: the job as a recipe in Python, which is also the program that is started.

Its configs are Megatron Core's, so the words are those of `megatron_words.py`. Leaves out: models
from Hugging Face (`AutoBridge`), adapters and fine-tuning.
"""

from math import ceil

from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES, series
from paceline.plan import Plan
from paceline.render.engine import Files, Gap
from paceline.render.environment import (
    export_lines,
    meeting_lines,
    restart_words,
    torchrun_options,
)
from paceline.render.megatron import connections
from paceline.render.megatron_gaps import core_gaps
from paceline.render.megatron_gaps import model_gaps as model_gaps
from paceline.render.megatron_words import (
    SHARDING,
    TOLD,
    Words,
    batch_words,
    copies,
    learned_positions,
    model_words,
    needed_lines,
    optimizer_words,
    parallel_words,
    planned_for,
    position_words,
    prefixes_of,
    schedule_words,
    tokenizer_of,
    uses_fsdp,
)
from paceline.render.shell import script
from paceline.render.text import commented, header

VERSION = ".".join(map(str, series(ENGINE_NAMES["megatron-bridge"].planned)))

CARRIES = TOLD | {"train.attention", "train.fp8_recipe", "checkpoint.keep_last"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`recipe.py`, whose `config()` is the job, and `launch.sh`, run on every node."""
    return {"recipe.py": _recipe(plan, job), "launch.sh": _launch(plan, job)}


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What Megatron Core lacks, and that Bridge's table of positions ends with the sample."""
    rows, seq_len = learned_positions(plan.profile), plan.profile.seq_len
    if rows in (0, seq_len):
        return core_gaps(plan, job)
    table = Gap(
        what=f"a table of {rows} learned positions",
        where="model",
        why="GPTModelProvider has as many as a sample has tokens (models/gpt_provider.py, provide)",
        nearest=f"{seq_len} rows: those that samples of this length use",
        fix=f"data.seq_len: {rows}",
    )
    return [*core_gaps(plan, job), table]


_IMPORTS = """
import os

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain


def config() -> ConfigContainer:
    data = os.environ["DATA_PATH"].split() if "DATA_PATH" in os.environ else DATA
    if os.environ.get("MOCK_DATA"):
        data = None
    elif data == []:
        raise SystemExit("set DATA_PATH to the prefix of token files, or MOCK_DATA=1")
    return ConfigContainer("""

_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
"""Names of training/mixed_precision.py."""


def _scaled(plan: Plan) -> str:
    """The precision, or how its fp8 is scaled where the job says so."""
    return plan.precision if plan.fp8_recipe == "auto" else plan.fp8_recipe


def _recipe(plan: Plan, job: Job) -> str:
    about = header(plan, job, f"For Megatron Bridge {VERSION}.", *planned_for(plan))
    optimizer = optimizer_words(job)
    decay = float(optimizer["weight_decay"])
    schedule = schedule_words(job)
    rates = {name: schedule.pop(name) for name in ("lr", "min_lr")}
    shards = plan.layout.sharding != "none" and plan.layout.data * plan.layout.context > 1
    offloads = plan.layout.offload != "none"
    is_latent = plan.profile.blocks[0].kv_rank > 0
    provider = "MLAModelProvider" if is_latent else "GPTModelProvider"
    parts = [
        *_call("model", provider, _model(plan, job)),
        *_call("train", "TrainingConfig", batch_words(plan, job) | _evaluation(plan, job)),
        *_call(
            "optimizer",
            "OptimizerConfig",
            optimizer
            | rates
            | {"use_distributed_optimizer": shards or offloads}
            | (_OFFLOAD if offloads else {}),
        ),
        *_call(
            "scheduler",
            "SchedulerConfig",
            schedule | {"start_weight_decay": decay, "end_weight_decay": decay},
        ),
        *_call("ddp", "DistributedDataParallelConfig", _sharding(plan, job, shards)),
        *_call("dist", "DistributedInitConfig", {"use_megatron_fsdp": uses_fsdp(plan)}),
        *_call(
            "dataset",
            "GPTDatasetConfig",
            {
                "random_seed": job.spec.train.seed,
                "seq_length": plan.profile.seq_len,
                "blend": _Code("None if data is None else (data, None)"),
                "split": "99,1,0",
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
                "dataloader_type": "single",
            },
        ),
        *_call(
            "tokenizer",
            "TokenizerConfig",
            _tokenizer(plan, job),
        ),
        *_call(
            "checkpoint",
            "CheckpointConfig",
            {
                "save": "checkpoints",
                "load": "checkpoints",
                "save_interval": plan.checkpoint_every,
                "most_recent_k": job.spec.checkpoint.keep_last,
                "ckpt_format": "fsdp_dtensor" if uses_fsdp(plan) else "torch_dist",
            },
        ),
        *_call("logger", "LoggerConfig", {"log_interval": 1}),
        *_call("rng", "RNGConfig", {"seed": max(1, job.spec.train.seed)}),
        f"        mixed_precision={_PRECISION.get(_scaled(plan))!r},",
        "    )",
        "",
        "",
        'if __name__ == "__main__":',
        "    pretrain(config(), forward_step)",
        "",
    ]
    data = None if job.spec.data.corpus == "mock" else prefixes_of(job)
    imports = _IMPORTS.replace("def config()", f"DATA = {data!r}\n\n\ndef config()")
    if is_latent:
        imports = imports.replace("gpt_provider import GPTModelP", "mla_provider import MLAModelP")
    if plan.attention != "auto":
        kernels = "from megatron.core.transformer.enums import AttnBackend\n"
        imports = imports.replace("\n\n\nDATA", f"\n{kernels}\n\nDATA")
    return commented(about) + "\n".join([imports, *parts])


def _tokenizer(plan: Plan, job: Job) -> Words:
    named = tokenizer_of(job)
    if named is not None:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": named}
    return {"tokenizer_type": "NullTokenizer", "vocab_size": plan.profile.head_outputs - 1}


class _Code(str):
    """Python, not text."""

    __slots__ = ()


def _call(field: str, name: str, words: Words) -> list[str]:
    """One config of the container, a line for each of its fields."""
    lines = [
        f"            {each}={value if isinstance(value, _Code) else repr(value)},"
        for each, value in words.items()
    ]
    return [f"        {field}={name}(", *lines, "        ),"]


def _model(plan: Plan, job: Job) -> Words:
    words = model_words(plan, job) | parallel_words(plan)
    gelu = learned_positions(plan.profile) > 0
    words["activation_func"] = _Code(f"torch.nn.functional.{'gelu' if gelu else 'silu'}")
    if "moe_layer_freq" in words:
        words["moe_layer_freq"] = _Code(words["moe_layer_freq"])
    if plan.attention != "auto":
        words["attention_backend"] = _Code(f"AttnBackend.{plan.attention}")
    if plan.layout.pipeline > 1:
        dtype = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}
        words["pipeline_dtype"] = _Code(f"torch.{dtype.get(plan.precision, 'float32')}")
    return (
        words
        | {
            "seq_length": plan.profile.seq_len,
            **position_words(plan, job),
            "share_embeddings_and_output_weights": plan.profile.tied,
            "vocab_size": plan.profile.head_outputs,
            "make_vocab_size_divisible_by": 1,
            "init_model_with_meta_device": uses_fsdp(plan),
        }
        | ({"gradient_accumulation_fusion": False} if uses_fsdp(plan) else {})
    )


def _evaluation(plan: Plan, job: Job) -> Words:
    batches = ceil(job.spec.evaluate.samples / plan.layout.global_batch)
    return {"eval_interval": plan.evaluate_every, "eval_iters": batches}


def _sharding(plan: Plan, job: Job, shards: bool) -> Words:
    layout = plan.layout
    found: Words = {
        "use_distributed_optimizer": shards,
        "overlap_grad_reduce": layout.data * layout.context > 1,
        "overlap_param_gather": shards,
        "grad_reduce_in_fp32": job.spec.train.gradient_compression != "bf16",
    }
    if uses_fsdp(plan):
        found |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": SHARDING[layout.sharding],
        }
    if copies(plan) > 1:
        found["num_distributed_optimizer_instances"] = copies(plan)
    return found


_OFFLOAD: Words = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
}


def _launch(plan: Plan, job: Job) -> str:
    about = header(
        plan,
        job,
        f"Needs Megatron Bridge {VERSION} (its container), and the same folder on every node:",
        "checkpoints/ is written here.",
        *restart_words(job),
    )
    return script(
        about,
        'cd "$(dirname "$0")"',
        *export_lines(plan, restarts=job.spec.recovery.max_restarts > 0),
        *(f"export {each.name}={each.value}  # {each.reason}" for each in connections(plan)),
        *(["unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron FSDP refuses 1"] * uses_fsdp(plan)),
        *meeting_lines(plan),
        *needed_lines(job),
        f"exec torchrun {' '.join(torchrun_options(plan))} \\",
        f'  --max-restarts={job.spec.recovery.max_restarts} recipe.py "$@"',
    )

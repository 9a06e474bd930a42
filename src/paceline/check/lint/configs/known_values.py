"""Settings that take one of a few words: a word that is none of them, with the nearest."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.check.finding import Finding
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, INFO, found
from paceline.check.lint.configs.words import words


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting and its words, in any case."""

    section: str
    """Empty at the top level."""

    names: tuple[str, ...]
    values: frozenset[str]
    is_closed: bool = False
    """Whether no version knows another word; otherwise only what is nearly one is an error."""


def check_values(path: str, config: Marked, choices: Iterable[Choice]) -> Iterator[Finding]:
    """Words that the program ends at when it reads the file."""
    for choice in choices:
        inside = config.at(choice.section) if choice.section else config
        for name in choice.names:
            value = inside.at(name) if inside is not None else None
            if value is not None:
                yield from _check(path, name, value, choice)


def _check(path: str, name: str, value: Marked, choice: Choice) -> Iterator[Finding]:
    text = "no" if value.false() else value.text()  # YAML reads the plain word so
    if text is None or not text or value.value is None or re.search(r"[${}<>%]", text):
        return
    known = {one.lower(): one for one in choice.values}
    if text.lower() in known:
        return
    near = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.7)
    yield found(
        "config-unknown-key",
        ERROR if near or choice.is_closed else INFO,
        path,
        value.line,
        f"{name} is {text}, which is none of {', '.join(sorted(choice.values))}",
        fix=f"write {known[near[0]]}" if near else "one of these",
        column=value.column,
    )


TORCHTITAN = (
    Choice(
        section="activation_checkpoint",
        names=("mode",),
        values=words("selective full memory_budget none"),
    ),
    Choice(
        section="training",
        names=("dtype", "mixed_precision_param"),
        values=words("bfloat16 float32"),
    ),
    Choice(
        section="parallelism",
        names=("fsdp_reshard_after_forward",),
        values=words("default always never"),
    ),
    Choice(
        section="parallelism",
        names=("pipeline_parallel_schedule",),
        values=words(
            """
            1F1B GPipe Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV
            PipelineScheduleSingle PipelineScheduleMulti
            """
        ),
    ),
    Choice(
        section="parallelism",
        names=("context_parallel_rotate_method",),
        values=words("allgather alltoall"),
    ),
    Choice(
        section="optimizer",
        names=("implementation",),
        values=words("for-loop foreach fused"),
    ),
    Choice(section="lr_scheduler", names=("decay_type",), values=words("linear sqrt cosine")),
    Choice(
        section="checkpoint",
        names=("async_mode",),
        values=words("disabled async async_with_pinned_mem"),
    ),
    Choice(
        section="checkpoint",
        names=("export_dtype",),
        values=words("float16 bfloat16 float32"),
    ),
)
"""`Literal` fields of torchtitan 0.2.0's job_config.py, and the schedules of
`torch.distributed.pipelining.schedules.get_schedule_class`."""

ACCELERATE = (
    Choice(
        section="",
        names=("mixed_precision",),
        values=words("no fp16 bf16 fp8"),
        is_closed=True,
    ),
    Choice(
        section="",
        names=("distributed_type",),
        values=words(
            """
            NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU
            MULTI_HPU MULTI_NEURON DEEPSPEED FSDP XLA TPU MPS MEGATRON_LM DATA_PARALLEL
            MODEL_PARALLEL
            """
        ),
    ),
    Choice(
        section="",
        names=("compute_environment",),
        values=words("LOCAL_MACHINE AMAZON_SAGEMAKER"),
    ),
    Choice(
        section="deepspeed_config",
        names=("offload_optimizer_device", "offload_param_device"),
        values=words("none cpu nvme"),
        is_closed=True,
    ),
    Choice(
        section="deepspeed_config",
        names=("zero_stage",),
        values=words("0 1 2 3"),
        is_closed=True,
    ),
    Choice(
        section="deepspeed_config",
        names=("deepspeed_multinode_launcher",),
        values=words("pdsh standard openmpi mvapich mpich nossh slurm"),
    ),
    Choice(
        section="fsdp_config",
        names=("fsdp_auto_wrap_policy", "auto_wrap_policy"),
        values=words("TRANSFORMER_BASED_WRAP SIZE_BASED_WRAP NO_WRAP"),
        is_closed=True,
    ),
    Choice(
        section="fsdp_config",
        names=("fsdp_state_dict_type", "state_dict_type"),
        values=words("FULL_STATE_DICT LOCAL_STATE_DICT SHARDED_STATE_DICT 1 2 3"),
        is_closed=True,
    ),
    Choice(
        section="fsdp_config",
        names=("fsdp_sharding_strategy", "sharding_strategy"),
        values=words("FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2 1 2 3 4 5"),
    ),
    Choice(
        section="fsdp_config",
        names=("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),
        values=words("BACKWARD_PRE BACKWARD_POST NO_PREFETCH 1 2"),
    ),
)
"""Constants and enumerations of accelerate 1.15, `utils/constants.py` and `dataclasses.py`, and
words that older ones wrote."""

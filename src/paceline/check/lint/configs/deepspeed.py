"""DeepSpeed's JSON configuration: keys that nothing reads, and what its own code refuses."""

from collections.abc import Iterator
from math import prod

from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import WARNING, Fault
from paceline.check.lint.configs.schema import check_schema, load_schema
from paceline.check.lint.context import Context
from paceline.check.lint.words import words_of

SCHEMA = load_schema("deepspeed")
SILENT = SCHEMA.id

_KNOWN = SCHEMA.keys("") | SCHEMA.keys("zero_optimization")
_SURELY = words_of("deepspeed", "surely")


def is_deepspeed(config: Marked) -> bool:
    """Whether a JSON mapping is DeepSpeed's: it has its keys, and more of them than of others'.

    Programs on top of DeepSpeed (GPT-NeoX) put some of them among their own, and hand those on.
    """
    keys = {name for name, _ in config.entries()}
    some = {"train_batch_size", "gradient_accumulation_steps", "fp16", "bf16"}
    return 2 * len(keys & _KNOWN) >= len(keys) and bool(keys & _SURELY or len(keys & some) > 1)


def check_deepspeed(config: Marked, context: Context) -> Iterator[Fault]:
    """Everything the file shows, alone and on the machines of the context."""
    yield from check_schema(SCHEMA, config, context)
    yield from _check_zero(config)
    yield from _check_asserts(config, context.num_processes)


def _check_zero(config: Marked) -> Iterator[Fault]:
    zero = config.at("zero_optimization")
    if zero is None or not isinstance(zero.value, dict):
        return
    given = zero.at("stage")
    stage = zero.number("stage") if given is not None else 0
    if stage is None:
        return
    offload, moved = zero.at("offload_param"), zero.at("offload_optimizer")
    if offload is not None and stage < 3 and offload.text("device") not in {None, "none"}:
        what = f"offload_param needs stage 3, and the stage is {stage}: the weights stay on the GPU"
        yield Fault(SILENT, offload, what, '"stage": 3, or take offload_param out')
    if moved is not None and stage == 0 and moved.text("device") not in {None, "none"}:
        what = "offload_optimizer needs a stage of 1 or more, and none is set"
        yield Fault(SILENT, moved, what, '"stage": 2')
    if given is None and len(zero.value) and not moved and not offload:
        what = "zero_optimization without a stage is stage 0: nothing is sharded"
        yield Fault(SILENT, zero, what, '"stage": 2', WARNING)


def _check_asserts(config: Marked, ranks: int | None) -> Iterator[Fault]:
    """What DeepSpeedConfig asserts. Source: deepspeed/runtime/config.py, 0.19.6,
    _batch_assertion and bf16 beside fp16. Tensor and sequence parallel ranks are no data ranks."""
    half, brain = config.at("fp16"), config.at("bf16") or config.at("bfloat16")
    if half and brain and half.true("enabled") and brain.true("enabled"):
        what = "fp16 and bf16 are both enabled"
        yield Fault("ds-fp16-bf16-both", brain, what, "keep one: bf16 on Ampere GPUs or newer")
    total = config.number("train_batch_size")
    is_split = config.at("tensor_parallel") or config.at("sequence_parallel_size")
    given = {
        "micro-batch": config.number("train_micro_batch_size_per_gpu"),
        "accumulation": config.number("gradient_accumulation_steps"),
        "ranks": None if is_split else ranks,
    }
    known = {name: number for name, number in given.items() if number and number > 0}
    product, is_whole = prod(known.values()), len(known) == len(given)
    if not total or total < 1 or (total == product if is_whole else total % product == 0):
        return
    by = " x ".join(f"{name} {number}" for name, number in known.items())
    what = f"train_batch_size {total} is not {'' if is_whole else 'a multiple of '}{by}"
    yield Fault("ds-batch-size-mismatch", config.at("train_batch_size") or 1, what)

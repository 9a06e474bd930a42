"""DeepSpeed's JSON configuration: keys that nothing reads, precision, the batch's triangle."""

from collections.abc import Iterator
from math import prod

from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import WARNING, Fault, no_bf16
from paceline.check.lint.configs.schema import check_schema, load_schema
from paceline.check.lint.context import Context
from paceline.check.lint.gpus import lacks_bf16
from paceline.check.lint.words import words_of
from paceline.units import counted

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
    yield from _check_precision(config, context)
    yield from _check_triangle(config, context.num_processes)


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
    elastic = zero.at("elastic_checkpoint")
    if elastic is not None and stage == 3 and elastic.true():
        # NotImplementedError in state_dict and load_state_dict. Source: deepspeed 0.19.8,
        # deepspeed/runtime/zero/stage3.py.
        what = "stage 3 has no elastic_checkpoint: save_checkpoint and load_checkpoint raise"
        fix = (
            "take it out; for other numbers of ranks use Universal Checkpointing "
            "(ds_to_universal.py, and load_universal in checkpoint)"
        )
        yield Fault("ckpt-world-size-mismatch", elastic, what, fix)
    if given is None and len(zero.value) and not moved and not offload:
        what = "zero_optimization without a stage is stage 0: nothing is sharded"
        yield Fault(SILENT, zero, what, '"stage": 2', WARNING)


def _check_precision(config: Marked, context: Context) -> Iterator[Fault]:
    fp16, bf16 = config.at("fp16"), config.at("bf16") or config.at("bfloat16")
    half = fp16 if fp16 is not None and fp16.true("enabled") else None
    brain = bf16 if bf16 is not None and bf16.true("enabled") else None
    if half and brain:
        first, last = sorted((half, brain), key=lambda one: (one.line, one.column))
        what, name = "fp16 and bf16 are both enabled", "fp16" if first is half else "bf16"
        seen = (("", first.line, f"{name} is enabled"),)
        fix = "keep one: bf16 on Ampere GPUs or newer"
        yield Fault("ds-fp16-bf16-both", last, what, fix, seen=seen)
    if brain and context.gpu and lacks_bf16(context.gpu):
        yield no_bf16(brain, "bf16.enabled", context.gpu)
    scale = half.at("loss_scale") if half and not brain else None
    if scale is not None and scale.text() in {"1", "1.0"}:
        what = "loss_scale 1 does not scale: small gradients become 0 in fp16"
        fix = '"loss_scale": 0, which scales dynamically'
        yield Fault("mixed-precision-loss-scaling", scale, what, fix, WARNING)


def _check_triangle(config: Marked, ranks: int | None) -> Iterator[Fault]:
    """train_batch_size = micro-batch x accumulation x ranks."""
    place, total = config.at("train_batch_size"), config.number("train_batch_size")
    micro = config.number("train_micro_batch_size_per_gpu")
    steps = config.number("gradient_accumulation_steps")
    if total is None or place is None or total < 1:
        return
    parts = [
        (micro, f"micro-batch {micro}"),
        (steps, counted(steps or 0, "accumulation step")),
        (ranks, counted(ranks or 0, "rank")),
    ]
    known = [(number, text) for number, text in parts if number and number > 0]
    product, is_all = prod(number for number, _ in known), len(known) == len(parts)
    if total == product if is_all else total % product == 0:
        return
    by = " x ".join(text for _, text in known) + (f" = {product}" if len(known) > 1 else "")
    what = f"train_batch_size {total} is not {'' if is_all else 'a multiple of '}{by}"
    fix = "leave train_batch_size out: DeepSpeed computes it"
    if not micro:
        fix = f'"train_batch_size": {-(-total // product) * product}'
    if is_all:
        fix = f'"train_batch_size": {product}, or leave one of the three out'
    yield Fault("ds-batch-size-mismatch", place, what, fix)

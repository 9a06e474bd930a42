"""DeepSpeed's JSON configuration: keys that nothing reads, at its stage or at all."""

from collections.abc import Iterator

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

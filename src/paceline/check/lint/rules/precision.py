"""What goes wrong with number formats, loss scaling, and how a loss is averaged."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, exclusive
from paceline.check.lint.facts.names import AUTOCAST, DDP, FSDP, FULLY_SHARD
from paceline.check.lint.facts.program import OWNERS, Program
from paceline.check.lint.facts.values import Value, stops_gradients

HALF = frozenset({"torch.float16", "torch.half"})
OLD_AUTOCAST = "torch.cuda.amp.autocast"


def casts_to_half(call: Call) -> bool:
    """Whether an autocast surely uses float16: by its dtype, or as CUDA's default."""
    if call.name not in {AUTOCAST, OLD_AUTOCAST} or call.open_ended:
        return False
    enabled = call.argument(None, "enabled")
    if enabled is not None and enabled.const is not True:
        return False
    dtype = call.argument(1 if call.name == AUTOCAST else 0, "dtype")
    if call.name == OLD_AUTOCAST:
        dtype = call.argument(None, "dtype")
        return dtype is None or is_half(dtype)
    if dtype is None:
        device = call.argument(0, "device_type")
        return device is not None and all(one.const == "cuda" for one in device.any())
    return is_half(dtype)


def is_half(dtype: Value) -> bool:
    return all(one.name in HALF for one in dtype.any())


def check_loss_scaling(program: Program, context: Context) -> Iterator[Finding]:
    """float16 without a GradScaler: small gradients become zero."""
    if program.framework in OWNERS or not program.backwards or not program.steps:
        return
    has_scaler = any(one.result.kind == "scaler" for one in program.all_calls)
    if not has_scaler and not program.has_call(method="scale"):
        for call in program.all_calls:
            if casts_to_half(call) and covers_training(program, call):
                what = (
                    "gradients are computed in float16 and nothing scales the loss: those "
                    "below 6e-8 become zero"
                )
                fix = 'use dtype=torch.bfloat16, or scaler = torch.amp.GradScaler("cuda")'
                yield program.finding("mixed-precision-loss-scaling", call, what, fix)
                return
        return
    scaled = [one for one in program.backwards if is_scaled(one)]
    yield from clipped_scaled(program, scaled)


def covers_training(program: Program, call: Call) -> bool:
    """Whether a forward pass of training stands in this autocast."""
    inside = [
        one
        for one in program.events
        if any(part.call is call for value in one.withs for part in value.any())
        and not any(map(stops_gradients, one.withs))
    ]
    if not inside:
        return False
    loops = {loop for one in inside for loop in one.loops}
    return any(
        (not one.loops or set(one.loops) & loops) and not exclusive(call, one)
        for one in program.backwards
    )


def is_scaled(backward: Call) -> bool:
    loss = backward.receiver
    return loss is not None and any(
        isinstance(one.call, Call)
        and one.call.method == "scale"
        and one.call.receiver is not None
        and one.call.receiver.has_kind("scaler")
        for one in loss.any()
    )


def clipped_scaled(program: Program, scaled: list[Call]) -> Iterator[Finding]:
    for clip in program.calls(
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.utils.clip_grad_value_",
        method=("clip_grad_norm_",),
    ):
        if not any(set(clip.loops) & set(one.loops) for one in scaled):
            continue
        unscaled = [
            one
            for one in program.calls(method="unscale_")
            if one.order < clip.order and set(one.loops) & set(clip.loops)
        ]
        if unscaled or any(exclusive(clip, one) for one in scaled):
            continue
        what = (
            f"the loss was scaled in {scaled[0].spot}, and the gradients are clipped "
            "before they are unscaled: the limit is thousands of times too small"
        )
        fix = "scaler.unscale_(optimizer) before clipping"
        yield program.finding("mixed-precision-loss-scaling", clip, what, fix, seen=scaled[:1])


def check_mixed_precision(program: Program, context: Context) -> Iterator[Finding]:
    """A distributed model that trains in float32 on GPUs."""
    if program.framework in OWNERS or not program.wraps or not program.backwards:
        return
    if program.mentions(
        "autocast", "float16", "half", "mixedprecision", "tf32", "matmul_precision"
    ):
        return
    if not program.mentions("cuda"):
        return
    for call in program.calls(DDP, FSDP, FULLY_SHARD):
        what = "the model trains in float32: slower than bfloat16 on GPUs with tensor cores"
        fix = "with torch.autocast('cuda', dtype=torch.bfloat16), or a mixed precision policy"
        yield program.finding("no-mixed-precision", call, what, fix)
        return


RULES = (check_loss_scaling, check_mixed_precision)

"""Losses that are no number, and optimizers whose parameters get no gradient."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.program import Program
from paceline.check.lint.rules.precision import scaler_off, scalers
from paceline.check.lint.rules.samplers import training_loops
from paceline.check.lint.values import Value

WATCHES_ITSELF = frozenset({"lightning", "transformers", "deepspeed", "tensorflow", "mlx", "ray"})
"""Frameworks that watch the loss, or whose loop is not in the program."""

FINITE = ("isfinite", "isnan", "isinf", "nonfinite", "nan_to_num", "anomaly", "math.nan")


def check_finite(program: Program, context: Context) -> Iterator[Finding]:
    """A training loop that would go on with a loss that is no number."""
    if not program.is_distributed or program.framework in WATCHES_ITSELF:
        return
    if scalers(program) or program.mentions(*FINITE):
        return
    training = training_loops(program)
    for step in program.steps:
        if not any(one in training for one in step.loops):
            continue
        yield program.finding(
            "nan-loss-undetected",
            Severity.INFO,
            step,
            what="nothing looks whether the loss or the gradients are finite: after one NaN every "
            "later step is lost, without an error",
            fix="clip_grad_norm_(..., error_if_nonfinite=True), or stop where the logged loss is "
            "not finite",
        )
        return


def check_scaled_step_of_nothing(program: Program, context: Context) -> Iterator[Finding]:
    """A GradScaler that steps an optimizer whose parameters were frozen under it."""
    used = [one for one in scalers(program) if not scaler_off(one)]
    if not used:
        return
    for adapted in program.calls("peft.get_peft_model"):
        model = adapted.argument(0, "model")
        if model is None:
            continue
        for made in program.all_calls:
            if made.result.kind != "optimizer" or made.own is not None:
                continue
            if made.order > adapted.order or made.root != adapted.root:
                continue
            if not holds_parameters(made, model) or adds_more(program, made):
                continue
            yield program.finding(
                "scaler-no-inf-checks",
                Severity.ERROR,
                made,
                what=(
                    f"line {adapted.line} freezes the parameters that this optimizer holds and "
                    "adds others that it does not: none of its own gets a gradient, and "
                    "scaler.step raises `No inf checks were recorded`"
                ),
                fix="make the optimizer after get_peft_model",
                seen=(adapted,),
            )
            break


def holds_parameters(made: Call, model: Value) -> bool:
    options = set(model.any())
    given = (*made.args, *made.kwargs.values())
    return any(options & set(one.origins()) for one in given)


def adds_more(program: Program, made: Call) -> bool:
    """Whether parameters are added to the optimizer later."""
    return any(
        one.receiver is made.result or one.receiver is None
        for one in program.calls(method="add_param_group")
    )


def check_never_scaled(program: Program, context: Context) -> Iterator[Finding]:
    """`scaler.step(optimizer)` after a backward pass of a loss that nothing scaled."""
    used = [one for one in scalers(program) if not scaler_off(one) and not one.open_ended]
    if not used or program.has_call(method="scale") or program.framework in WATCHES_ITSELF:
        return
    for step in program.steps:
        if step.receiver is None or not step.receiver.has_kind("scaler"):
            continue
        behind = [one for one in program.backwards if set(one.loops) & set(step.loops)]
        if behind:
            yield program.finding(
                "mixed-precision-loss-scaling",
                Severity.ERROR,
                step,
                what=(
                    f"the loss of line {behind[0].line} was not scaled: scaler.step raises, for it "
                    "has no scale to divide by"
                ),
                fix="scaler.scale(loss).backward()",
                seen=behind[:1],
            )
            return


RULES = (
    check_finite,
    check_scaled_step_of_nothing,
    check_never_scaled,
)

"""What goes wrong between a model and its DistributedDataParallel."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.values import Value, innermost, stops_gradients


def wrapped_models(program: Program) -> Iterator[tuple[Call, Value]]:
    """Each DDP(...) call and the plain model in it."""
    for call in program.calls(DDP):
        for one in (call.result.inner or Value()).any():
            yield call, innermost(one)


def check_forward_bypassed(program: Program, context: Context) -> Iterator[Finding]:
    """The loss comes from `model.module` or the model as it was before wrapping."""
    plain = {id(innermost(one)): call for call, one in wrapped_models(program)}
    plain |= {id(one): call for call in program.calls(DDP) for one in inside(call.result)}
    if not plain or averages_itself(program):
        return
    reported: set[int] = set()
    for backward in program.backwards:
        loss = backward.receiver if not backward.args else backward.args[0]
        sources = {id(one) for one in loss.origins()} if loss is not None else set()
        for call in program.all_calls:
            if id(call.result) not in sources or id(call.node) in reported:
                continue
            if any(map(stops_gradients, call.withs)):
                continue
            if any(is_wrapped_output(one) for one in (*call.args, *call.kwargs.values())):
                continue  # a method of the plain model on what the wrapped one gave
            model = bypassed_model(call)
            if model is not None and model.options:
                continue
            if model is None or id(model) not in plain or plain[id(model)].order > call.order:
                continue
            if any(one.call is not None and id(one.call.node) in reported for one in call.frames):
                continue
            if not any(loop in backward.loops for loop in call.loops) and call.loops:
                continue
            reported.add(id(call.node))
            yield program.finding(
                "ddp-forward-bypassed",
                chosen_at(call, model),
                what=(
                    "the loss of the backward pass comes from the plain model inside DDP: DDP "
                    "never sees this forward pass, and the ranks' gradients are never averaged"
                ),
                fix="call the wrapped model",
                seen=(plain[id(model)], backward),
            )


def is_wrapped_output(value: Value) -> bool:
    """Whether a value comes from a forward pass of the wrapped model."""
    made = (one.call for one in value.origins() if one.kind == "output")
    return any(
        isinstance(one, Call) and one.forward_of is not None and one.forward_of.wrapped_by("ddp")
        for one in made
    )


def chosen_at(call: Call, model: Value) -> ast.AST:
    """Where the plain model was taken: the call, or one that hands it on."""
    node = call.node
    for frame in reversed(call.frames):
        given = (*frame.call.args, *frame.call.kwargs.values()) if frame.call is not None else ()
        if frame.call is None or not any(model in one.any() for one in given):
            break
        node = frame.call.node
    return node


def inside(wrapped: Value) -> Iterator[Value]:
    one: Value | None = wrapped.inner
    while one is not None:
        yield from one.any()
        one = one.inner


def bypassed_model(call: Call) -> Value | None:
    """The model that a call runs: `model(x)`, or a method of it that may run its layers."""
    if call.forward_of is not None:
        return call.forward_of
    receiver = call.receiver
    if receiver is not None and receiver.kind == "model" and call.own is not None:
        return receiver
    return None


def averages_itself(program: Program) -> bool:
    """Whether the program averages gradients by hand."""
    return any(
        any(
            one.attribute == "grad" or one.label.endswith((".grad", ".grad.data"))
            for argument in call.args
            for one in argument.origins()
        )
        for call in program.collectives
    )


RULES = (check_forward_bypassed,)

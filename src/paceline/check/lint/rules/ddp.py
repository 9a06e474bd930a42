"""What goes wrong between a model and its DistributedDataParallel."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, exclusive
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.values import Value, innermost


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


MOVES = frozenset({"to", "cuda", "cpu", "half", "float", "bfloat16", "double", "to_empty"})


def check_moved_after_wrap(program: Program, context: Context) -> Iterator[Finding]:
    """A wrapped model moved or cast: DDP's buckets keep the old parameters."""
    reported: set[int] = set()
    for call in program.all_calls:
        if call.method not in MOVES or call.receiver is None:
            continue
        wraps = [one for one in program.calls(DDP) if moved_model(call.receiver, one.result)]
        wraps = [one for one in wraps if one.order < call.order and not exclusive(one, call)]
        if not wraps or not trained_later(program, call) or id(wraps[0]) in reported:
            continue
        reported.add(id(wraps[0]))
        yield program.finding(
            "ddp-moved-after-wrap",
            call,
            what=(
                f"the model was wrapped in {wraps[0].spot} and is moved or cast here, while "
                "training goes on: DDP's gradient buckets still belong to the old parameters"
            ),
            fix="move and cast the model before DDP(...); copy the state dict to save it",
            seen=(wraps[0],),
        )


def moved_model(receiver: Value, wrapped: Value) -> bool:
    options = list(receiver.any())
    return wrapped in options or any(one in options for one in inside(wrapped))


def trained_later(program: Program, call: Call) -> bool:
    """Whether a backward pass follows, or the call stands in a training loop itself."""
    return any(
        one.order > call.order or any(loop in one.loops for loop in call.loops)
        for one in program.backwards
    )


RULES = (
    check_forward_bypassed,
    check_moved_after_wrap,
)

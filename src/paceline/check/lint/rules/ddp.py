"""What goes wrong between a model and its DistributedDataParallel."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Event, Guard, exclusive
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.source import is_main_test
from paceline.check.lint.values import RANK, SHARD, Value, innermost
from paceline.check.lint.words import words_of


def wrapped_models(program: Program) -> Iterator[tuple[Call, Value]]:
    """Each DDP(...) call and the plain model in it."""
    for call in program.calls(DDP):
        for one in (call.result.inner or Value()).any():
            yield call, innermost(one)


def check_model_differs(program: Program, context: Context) -> Iterator[Finding]:
    """The model's shape depends on the rank or on its part of the data."""
    reported: set[int] = set()
    for call in program.wraps:
        for made in model_makers(call.argument(0, "module") or Value()):
            for size in (*made.args, *made.kwargs.values()):
                cause = rank_made(size)
                if cause is None or id(cause) in reported or cause.node is None:
                    continue
                reported.add(id(cause))
                yield program.finding(
                    "ddp-model-differs",
                    Severity.ERROR,
                    statement_of(program, cause),
                    what=(
                        f"the model in line {made.line} is sized by what each rank computes from "
                        "its own part of the data or its rank: the ranks wrap different models"
                    ),
                    fix=(
                        "compute it from the whole data on every rank, or on rank 0 and broadcast "
                        "it (dist.broadcast_object_list) before the model is made"
                    ),
                    seen=(made, call),
                )


def model_makers(model: Value) -> Iterator[Call]:
    """Calls that made a model and the models it is made of."""
    for one in model.origins():
        if one.kind == "model" and isinstance(one.call, Call) and one.wrapper is None:
            yield one.call


def rank_made(size: Value) -> Value | None:
    """What makes a model's size differ: the collection whose length it is, or the number."""
    if size.kind in {"device", "model"} or size.has_kind("mesh"):
        return None
    if not size.taints & {SHARD}:
        return (
            size
            if RANK in size.taints and size.operation is not None and arithmetic(size)
            else None
        )
    for one in size.origins():
        if one.instance == "builtins.len" and one.sources and SHARD in one.sources[0].taints:
            return one.sources[0]
    return size


def arithmetic(value: Value) -> bool:
    return value.operation is not None and value.operation[0] in {"Add", "Sub", "Mult"}


def statement_of(program: Program, value: Value) -> "ast.AST | Event":
    """The assignment that first holds a value; else the expression that made it."""
    for assign in program.assigns:
        if assign.value is value:
            return assign
    assert value.node is not None
    return value.node


CHANGES = ("resize_token_embeddings", "add_module", "register_parameter", "add_adapter")


def check_model_changed_by_rank(program: Program, context: Context) -> Iterator[Finding]:
    """A model that is changed on some ranks before it is wrapped."""
    wraps = program.wraps
    if not wraps:
        return
    last = max(one.order for one in wraps)
    wrapped = [one for call in wraps for one in (call.argument(0, "module") or Value()).origins()]
    for call in program.all_calls:
        if call.order > last or not any(
            one.by_rank and one.main is not None for one in call.guards
        ):
            continue
        if call.is_method(*CHANGES) and any(one in wrapped for one in of_call(call)):
            yield changed(program, call)
        if call.name == "torch.compile" and call.result in wrapped:
            yield program.finding(
                "compile-rank-skew",
                Severity.INFO,
                call,
                what="only some ranks compile the model: the others wait, and graphs differ",
                fix="compile on every rank",
            )
    for assign in program.assigns:
        if assign.order > last or assign.owner is None or assign.attribute is None:
            continue
        if not any(one.by_rank and one.main is not None for one in assign.guards):
            continue
        if assign.owner in wrapped and assign.value.has_kind("model"):
            yield changed(program, assign)


def of_call(call: Call) -> list[Value]:
    return list(call.receiver.any()) if call.receiver is not None else []


def changed(program: Program, event: Event) -> Finding:
    return program.finding(
        "ddp-model-differs",
        Severity.ERROR,
        event,
        what="only some ranks change the model before it is wrapped: their models differ",
        fix="change it on every rank",
    )


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
                Severity.ERROR,
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
            Severity.ERROR,
            call,
            what=(
                f"the model was wrapped in line {wraps[0].line} and is moved or cast here, while "
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


MODULE_METHODS = words_of("python", "module_methods")


def check_method_of_wrapper(program: Program, context: Context) -> Iterator[Finding]:
    """A method of the model called on the DistributedDataParallel around it, which has none."""
    named = {"module", *(one.attribute for one in program.assigns)} | {
        one.method for one in program.all_calls if any(each.how == "except" for each in one.guards)
    }
    reported: set[int] = set()
    for call in program.all_calls:
        method, options = call.method or "", of_call(call)
        wraps = [one.call for one in options if one.instance == DDP and isinstance(one.call, Call)]
        if not wraps or id(call.node) in reported or method in MODULE_METHODS | named:
            continue
        always = len(wraps) == len(options)
        if method.startswith("_") or not (always or all(map(says_nothing, call.guards))):
            continue
        reported.add(id(call.node))
        yield program.finding(
            "ddp-method-missing",
            Severity.ERROR if always else Severity.WARNING,
            call,
            what=(
                f"the model is wrapped in line {wraps[0].line}, and DistributedDataParallel has no "
                f"`{method}`: AttributeError" + ("" if always else " in runs of several ranks")
            ),
            fix=f"call `.module.{method}(...)`, which is the model inside",
            seen=(wraps[0],),
        )


def says_nothing(guard: Guard) -> bool:
    """Whether a condition is the same in runs of one rank and of many: every few steps, a rank."""
    every_few = any(one.operation and one.operation[0] == "Mod" for one in guard.test.origins())
    return guard.by_rank or every_few or is_main_test(getattr(guard.node, "test", guard.node))


RULES = (
    check_method_of_wrapper,
    check_model_differs,
    check_model_changed_by_rank,
    check_forward_bypassed,
    check_moved_after_wrap,
)

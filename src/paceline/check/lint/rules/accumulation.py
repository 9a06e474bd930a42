"""Gradient accumulation under DDP: which micro-batch averages the gradients."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Guard
from paceline.check.lint.facts.names import DDP
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import DATA, Value


def step_guards(program: Program) -> Iterator[tuple[Call, Guard]]:
    """Optimizer steps that only some iterations of their loop reach, and the condition."""
    for step in program.steps:
        if not step.loops:
            continue
        for guard in step.guards:
            if counts(guard.test) and guard.how in {"if", "exit"}:
                yield step, guard


def counts(test: Value) -> bool:
    """Whether a condition is on `counter % n`; what a call was given to make it does not count."""
    waiting, seen = [test], {id(test)}
    for one in waiting:
        sign, *operands = one.operation or ("",)
        parts = (part for operand in operands for part in operand.origins())
        if sign == "Mod" and any(part.kind == "counter" for part in parts):
            return True
        inside = (*operands, *one.options, *one.sources) if one.call is None else ()
        waiting += [each for each in inside if id(each) not in seen]
        seen |= set(map(id, inside))
    return False


def check_no_sync_missing(program: Program, context: Context) -> Iterator[Finding]:
    """Gradients are averaged in every micro-batch of an accumulation."""
    if not program.has_call(DDP) or manages_sync(program):
        return
    reported: set[int] = set()
    for step, guard in step_guards(program):
        for backward in program.backwards:
            if not set(backward.loops) & set(step.loops[-1:]) or id(backward.node) in reported:
                continue
            if any(one.test is guard.test for one in backward.guards):
                continue
            if step_after(program, backward) is not step or cleared_before(program, backward, step):
                continue
            reported.add(id(backward.node))
            what = (
                f"the optimizer steps once in several micro-batches ({guard.spot}), and "
                "this backward pass averages the gradients over the ranks in each of them"
            )
            fix = "enter model.no_sync() for all micro-batches but the last before a step"
            yield program.finding("no-sync-missing", backward, what, fix, seen=(guard,))


def check_engine_steps(program: Program, context: Context) -> Iterator[Finding]:
    """DeepSpeed's engine steps in some micro-batches alone: it counts them itself."""
    if program.has_call(method="set_gradient_accumulation_boundary"):
        return
    for step, guard in step_guards(program):
        model = step.receiver
        if model is None or not model.wrapped_by("deepspeed"):
            continue
        for backward in program.backwards:
            is_of_engine = backward.receiver is not None and backward.receiver is model
            if is_of_engine and all(one.test is not guard.test for one in backward.guards):
                what = (
                    f"the engine steps once in several backward passes ({guard.spot}), of which "
                    "each ends an accumulation for DeepSpeed: ZeRO-2 keeps the last one's "
                    "gradients alone"
                )
                fix = "step() after every backward, and gradient_accumulation_steps in the file"
                yield program.finding(
                    "engine-step-skipped", step, what, fix, seen=(guard, backward)
                )
                return


def cleared_before(program: Program, backward: Call, step: Call) -> bool:
    """Whether its gradients are always cleared before the step: they are no part of a sum."""
    return any(
        backward.order < one.order < step.order and set(one.guards) <= set(backward.guards)
        for one in program.calls(method="zero_grad")
    )


def step_after(program: Program, backward: Call) -> Call | None:
    """The optimizer step that comes next in a loop: of two models, each has its own.

    Where none follows, the loop's first: it uses what the iteration before has left.
    """
    loops = set(backward.loops)
    steps = [one for one in program.steps if loops & set(one.loops)]
    after = [one for one in steps if one.order > backward.order]
    return min(after or steps, key=lambda one: one.order, default=None)


SCALES = frozenset({"Div", "Mult", "FloorDiv"})


def check_loss_not_divided(program: Program, context: Context) -> Iterator[Finding]:
    """Gradients of micro-batches are summed where the loss of the whole batch is a mean."""
    scaled = program.calls(method=("div_", "mul_"))
    if program.framework is not None or any(
        "grad" in of.receiver.label for of in scaled if of.receiver
    ):
        return
    for backward, step in accumulated(program):
        loss = backward.receiver if not backward.args else backward.args[0]
        if loss is None or DATA not in loss.taints:
            continue
        if any(one.operation and one.operation[0] in SCALES for one in loss.origins()):
            continue
        what = (
            f"the optimizer steps ({step.spot}) on the sum of the micro-batches' "
            "gradients: they, and the norm that is clipped, grow with their number"
        )
        fix = "divide the loss by the number of micro-batches before backward()"
        yield program.finding("ga-loss-normalisation", backward, what, fix, seen=(step,))
        return


def accumulated(program: Program) -> Iterator[tuple[Call, Call]]:
    """Backward passes of several micro-batches in a loop of their own, and the step after it."""
    for backward in program.backwards:
        for step in program.steps:
            inner = backward.loops[len(step.loops) :]
            around = bool(inner) and backward.loops[: len(step.loops)] == step.loops
            if around and any(inner[0] in one.loops for one in program.calls(method="zero_grad")):
                continue  # cleared for each micro-batch: nothing is summed
            if around and inner[0].counter and not inner[0].over_batches and step.loops:
                yield backward, step


def check_gradients_kept(program: Program, context: Context) -> Iterator[Finding]:
    """Each step uses the sum of all gradients since the start: nothing clears them."""
    if program.framework not in (None, "accelerate") or program.mentions(*CLEARS):
        return
    if not program.is_whole:
        return  # what is not read may clear them
    for step in program.steps:
        made = stepped(step)
        if not step.loops or made is None or step.args[1:] or step.kwargs:
            continue
        loop = step.loops[-1]
        if loop in made.loops or any(one.attribute == "grad" for one in program.assigns):
            continue
        for backward in program.backwards:
            if loop in backward.loops:
                what = (
                    f"{backward.spot} adds to the gradients in each iteration, and nothing clears "
                    "them: each step uses the sum of all since the start"
                )
                fix = f"call {ast.unparse(step_owner(step))}.zero_grad() after it"
                yield program.finding("zero-grad-missing", step, what, fix, seen=(backward, made))
                return


CLEARS = ("zero_grad", "zero_", "set_to_none", "autograd.grad", "clear_grad", "deepspeed")
"""Words of programs that clear gradients, or in which another one may."""


def stepped(step: Call) -> Call | None:
    """The call that made the optimizer of torch that is stepped; None of another's."""
    for given in (step.receiver, *step.args):
        for one in given.any() if given is not None else ():
            made = one.call
            if isinstance(made, Call) and made.name.startswith("torch.optim."):
                return made
    return None


def step_owner(step: Call) -> ast.AST:
    """The optimizer as it is written: `opt` of `opt.step()` and of `scaler.step(opt)`."""
    node = step.node
    assert isinstance(node, ast.Call)
    return node.args[0] if node.args else getattr(node.func, "value", node.func)


def manages_sync(program: Program) -> bool:
    if program.has_call(method=("no_sync", "accumulate", "set_requires_gradient_sync")):
        return True
    return any(one.attribute == "require_backward_grad_sync" for one in program.assigns)


RULES = (
    check_no_sync_missing,
    check_engine_steps,
    check_loss_not_divided,
    check_gradients_kept,
)

"""Gradient accumulation under DDP: which micro-batch averages the gradients."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Guard
from paceline.check.lint.facts.names import DDP
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value


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


def manages_sync(program: Program) -> bool:
    if program.has_call(method=("no_sync", "accumulate", "set_requires_gradient_sync")):
        return True
    return any(one.attribute == "require_backward_grad_sync" for one in program.assigns)


RULES = (check_no_sync_missing,)

"""Gradient accumulation under DDP: which micro-batch averages the gradients."""

import ast
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Event, Guard, Loop
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.rules.decisions import guard_outside
from paceline.check.lint.values import DATA, UNKNOWN, Value, at_iteration


def step_guards(program: Program) -> Iterator[tuple[Call, Guard]]:
    """Optimizer steps that only some iterations of their loop reach, and the condition."""
    for step in program.steps:
        if not step.loops:
            continue
        for guard in step.guards:
            if counts(guard.test) and guard.how in {"if", "exit"}:
                yield step, guard


def counts(test: Value) -> bool:
    """Whether a condition is on `counter % n`."""
    return any(
        one.operation is not None
        and one.operation[0] == "Mod"
        and any(
            part.kind == "counter" for operand in one.operation[1:] for part in operand.origins()
        )
        for one in test.origins()
    )


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
            if step_after(program, backward) is not step:
                continue
            reported.add(id(backward.node))
            yield program.finding(
                "no-sync-missing",
                backward,
                what=(
                    f"the optimizer steps once in several micro-batches ({guard.spot}), and "
                    "this backward pass averages the gradients over the ranks in each of them"
                ),
                fix="enter model.no_sync() for all micro-batches but the last before a step",
                seen=(guard,),
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
        yield program.finding(
            "ga-loss-normalisation",
            backward,
            what=(
                f"the optimizer steps ({step.spot}) on the sum of the micro-batches' "
                "gradients: they, and the norm that is clipped, grow with their number"
            ),
            fix="divide the loss by the number of micro-batches before backward()",
            seen=(step,),
        )
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


def manages_sync(program: Program) -> bool:
    if program.has_call(method=("no_sync", "accumulate", "set_requires_gradient_sync")):
        return True
    return any(one.attribute == "require_backward_grad_sync" for one in program.assigns)


def check_no_sync_off_by_one(program: Program, context: Context) -> Iterator[Finding]:
    """The micro-batch before a step is the one whose gradients are not averaged."""
    steps = list(step_guards(program))
    reported: set[int] = set()
    for event, loop, skips in sync_switches(program):
        if id(event.node) in reported:
            continue
        last = last_iteration_skipped(program, loop, skips)
        if last is not None:
            reported.add(id(event.node))
            yield program.finding(
                "no-sync-off-by-one",
                event,
                what=(
                    f"the optimizer steps after this loop ({last.spot}), and the gradients of "
                    "its last micro-batch are not averaged over the ranks"
                ),
                fix="average in the loop's last iteration: `i == num_micro_batches - 1`",
                seen=(loop, last),
            )
            continue
        for step, guard in steps:
            if loop not in step.loops:
                continue
            wrong = wrong_iterations(skips, guard)
            if wrong is None or any(denies(event.guards, one) for one in step.guards):
                continue
            reported.add(id(event.node))
            yield program.finding(
                "no-sync-off-by-one",
                event,
                what=(
                    f"in iteration {wrong} (from 0) the optimizer steps ({step.spot}) on "
                    "gradients that were not averaged over the ranks: the two conditions do not fit"
                ),
                fix="average exactly in the micro-batch that steps: use the step's own condition",
                seen=(guard, step),
            )
            break


def check_never_averaged(program: Program, context: Context) -> Iterator[Finding]:
    """A loop that steps, all of whose backward passes are under `no_sync()`."""
    for call in program.calls(method="no_sync"):
        for step in program.steps:
            loop = step.loops[-1] if step.loops else None
            passes = [one for one in program.backwards if loop in one.loops]
            if loop is None or not passes or not all(is_inside(each, call) for each in passes):
                continue
            if is_always(call, loop) and is_always(step, loop):
                yield program.finding(
                    "no-sync-off-by-one",
                    call,
                    what=(
                        f"the optimizer steps ({step.spot}), and every backward pass of the loop "
                        "is under no_sync(): gradients are never averaged over the ranks"
                    ),
                    fix="leave the backward pass before each step outside of no_sync()",
                    seen=(passes[0], step),
                )


def is_always(event: Event, loop: Loop) -> bool:
    """Whether every pass of the loop comes there."""
    return all(guard_outside(guard, loop) for guard in event.guards)


def is_inside(event: Event, call: Call) -> bool:
    """Whether an event stands in a `with` of this call."""
    return any(part.call is call for value in event.withs for part in value.any())


def denies(guards: Sequence[Guard], guard: Guard) -> bool:
    """Whether a condition has the step's own one in it, denied: `not need_update`."""
    tests = [one.node.test for one in guards if isinstance(one.node, ast.If)]
    return isinstance(guard.node, ast.If) and any(
        isinstance(one, ast.UnaryOp)
        and isinstance(one.op, ast.Not)
        and ast.unparse(one.operand) == ast.unparse(guard.node.test)
        for test in tests
        for one in ast.walk(test)
    )


def sync_switches(program: Program) -> Iterator[tuple[Event, Loop, list[tuple[Value, bool]]]]:
    """Places that decide whether gradients are averaged: conditions under which they are not."""
    for call in program.calls(method="no_sync"):
        if not call.loops:
            continue
        loop = call.loops[-1]
        conditions = [
            (guard.test, guard.holds)
            for guard in call.guards
            if counter_test(guard.test) and guard.how in {"if", "exit"}
        ]
        yield call, loop, conditions
    for assign in program.assigns:
        if assign.attribute != "require_backward_grad_sync" or not assign.loops:
            continue
        if counter_test(assign.value):
            yield assign, assign.loops[-1], [(assign.value, False)]
    for call in program.calls(method="set_requires_gradient_sync"):
        flag = call.argument(0, "requires_gradient_sync")
        if call.loops and flag is not None and counter_test(flag):
            yield call, call.loops[-1], [(flag, False)]


def counter_test(test: Value) -> bool:
    return any(one.kind == "counter" for one in test.origins())


ITERATIONS = 64
"""Enough for two rounds of any accumulation whose length is unknown and taken as 4."""


def wrong_iterations(skips: list[tuple[Value, bool]], guard: Guard) -> int | None:
    """The first iteration that steps on gradients that were not averaged."""
    assumed = {
        one: 4 for test in (guard.test, *(test for test, _ in skips)) for one in leaves(test)
    }
    for leaf in list(assumed):
        if leaf.instance == "builtins.len":
            assumed[leaf] = 10_007
    for iteration in range(ITERATIONS):
        steps = at_iteration(guard.test, iteration, assumed)
        unsynced = [at_iteration(test, iteration, assumed) for test, _ in skips]
        if steps is UNKNOWN or any(one is UNKNOWN for one in unsynced):
            return None
        skipped = all(bool(one) is holds for one, (_, holds) in zip(unsynced, skips, strict=True))
        if bool(steps) is guard.holds and skipped:
            return iteration
    return None


def last_iteration_skipped(
    program: Program, loop: Loop, skips: list[tuple[Value, bool]]
) -> Call | None:
    """The optimizer step after a loop over micro-batches whose last one is not averaged."""
    call = loop.over.call if loop.over is not None else None
    if not isinstance(call, Call) or call.name != "builtins.range" or len(call.args) != 1:
        return None
    after = [
        one
        for one in program.steps
        if loop not in one.loops and one.loops == loops_around(program, loop)
    ]
    if not after or not skips:
        return None
    stop = call.args[0]
    assumed = {one: 4 for test in (stop, *(test for test, _ in skips)) for one in leaves(test)}
    count = at_iteration(stop, 0, assumed)
    if not isinstance(count, int):
        return None
    found = [at_iteration(test, count - 1, assumed) for test, _ in skips]
    if any(one is UNKNOWN for one in found):
        return None
    wrong = all(bool(one) is holds for one, (_, holds) in zip(found, skips, strict=True))
    return after[0] if wrong else None


def loops_around(program: Program, loop: Loop) -> tuple[Loop, ...]:
    inside = next(one for one in program.events if loop in one.loops)
    return inside.loops[: inside.loops.index(loop)]


def leaves(test: Value) -> Iterator[Value]:
    """Unknown numbers in a condition: `args.accum`, `len(loader)`."""
    if test.operation is not None:
        for part in test.operation[1:]:
            yield from leaves(part)
    elif test.options:
        for one in test.options:
            yield from leaves(one)
        if test.test is not None:
            yield from leaves(test.test)
    elif test.const is UNKNOWN and test.default is UNKNOWN and test.kind != "counter":
        yield test


RULES = (
    check_no_sync_missing,
    check_loss_not_divided,
    check_no_sync_off_by_one,
    check_never_averaged,
)

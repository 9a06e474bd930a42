"""Ranks that branch on what they alone see: files, their loss, their clock, their failure."""

import ast
import sys
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Event, Exit, Guard, Loop
from paceline.check.lint.facts.names import CLOCKS, KNOWN_LIBRARIES
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import (
    DATA,
    TIME,
    UNKNOWN,
    Value,
)
from paceline.check.lint.rules.agreement import joint_kind, rank_guard

DECISIONS = frozenset({DATA, TIME})


REASONS = {
    DATA: "this rank's own batch or loss",
    TIME: "this rank's clock",
}


def check_divergent_exits(program: Program, context: Context) -> Iterator[Finding]:
    """`continue`, `break` or `return` on what one rank alone knows, where ranks work together."""
    if not program.is_distributed:
        return
    reported: set[int] = set()
    for leave in program.exits:
        if leave.kind == "raise" or not leave.loops or any(one.alone for one in leave.guards):
            continue
        guard = decision(leave)
        if guard is None or id(guard.node) in reported:
            continue
        loop = left_loop(leave)
        if loop is None or guard_outside(guard, loop):
            continue
        missed = missed_call(program, leave, loop)
        if missed is None:
            continue
        reported.add(id(guard.node))
        yield decision_finding(
            program,
            leave,
            guard,
            missed,
            f"a rank for which it holds `{leave.kind}`s in {leave.spot}, while the others go on to "
            f"{missed.name.rpartition('.')[2]} in {missed.spot} and wait for it",
            "decide together: `flag = torch.tensor(int(condition), device=device); "
            "dist.all_reduce(flag, op=dist.ReduceOp.MAX)`, then branch on `flag.item()`; or filter "
            "the data before the sampler",
        )


def decision(event: Event) -> Guard | None:
    """The innermost condition on what one rank alone knows."""
    for guard in reversed(event.guards):
        reasons = guard.divergent & DECISIONS
        if reasons and guard.how != "decorator":
            return guard
    return None


def left_loop(leave: Exit) -> Loop | None:
    """The loop that is left or whose iteration is cut short; comprehensions do not count."""
    loops = [one for one in leave.loops if not one.is_comprehension]
    if leave.kind != "return":
        loops = [one for one in loops if one.depth == len(leave.frames)]
        return loops[-1] if loops else None
    own = [one for one in loops if one.depth == len(leave.frames)]
    return own[0] if own else None


def guard_outside(guard: Guard, loop: Loop) -> bool:
    first, last = loop.line, getattr(loop.node, "end_lineno", loop.line)
    return not first <= guard.line <= last or guard.how == "while"


def missed_call(program: Program, leave: Exit, loop: Loop) -> Call | None:
    """A call of all ranks that the others still make in this loop, and this rank no more."""
    for call in program.all_calls:
        if loop not in call.loops or not needs_company(program, call):
            continue
        failed = any(one.how == "except" for one in leave.guards)
        if leave.kind == "continue" and call.order < leave.order and not failed:
            continue
        return call
    return None


def needs_company(program: Program, call: Call) -> bool:
    kind = joint_kind(program, call)
    if kind in {"collective", "save"}:
        return True
    if call.method == "backward" and call.name != "torch.autograd.backward":
        return bool(program.wraps) or program.framework in WRAPPING_FRAMEWORKS
    return False


WRAPPING_FRAMEWORKS = frozenset({"accelerate", "fabric", "deepspeed", "ray", "horovod"})


def shown_source(program: Program, event: Event, guard: Guard) -> Value | None:
    """Where a condition gets a value of this rank alone from, in the condition's own function.

    None where a part of the way there is not in sight: an attribute of an object, another
    function, code that was not read. It may have made ranks equal.
    """
    frame = event.frames[guard.depth - 1] if guard.depth else None
    function = frame.function.node if frame is not None else program.tree
    inside = {id(node) for node in ast.walk(function)}
    losses = differentiated(program)
    for reason in sorted(guard.divergent & {DATA, TIME}):
        found = source_of(guard.test, reason, inside, losses)
        if found is not None:
            return found
    return None


def source_of(
    value: Value, reason: str, inside: set[int], losses: set[int], depth: int = 30
) -> Value | None:
    """The loss, output, batch or clock that makes ranks differ in a value, whatever it may be."""
    if depth == 0 or id(value.node) not in inside or asks_for_presence(value):
        return None
    if reason == TIME and any(getattr(one, "const", None) == 0 for one in value.operation or ()):
        return None  # whether a clock was read at all
    if value.options:
        found = [
            source_of(one, reason, inside, losses, depth - 1)
            for one in value.options
            if one.const is UNKNOWN
        ]
        return found[0] if found and all(one is not None for one in found) else None
    made = value.call
    if reason == TIME:
        is_source = isinstance(made, Call) and made.name in CLOCKS
    else:
        is_source = id(value) in losses or value.kind in {"output", "batch"}
    if is_source:
        return value
    unread = isinstance(made, Call) and made.own is None and is_unread(made.name)
    only = made.receiver if isinstance(made, Call) else value.receiver
    parts = [only or Value()] if unread or value.attribute is not None else value.inputs()
    for one in parts:
        if reason in one.taints:
            return source_of(one, reason, inside, losses, depth - 1)
    return None


def is_unread(name: str) -> bool:
    """Whether a call is of a method of something unknown (`?.item`), or of a library's that rules
    know nothing of: what it is given may be equal on all ranks afterwards."""
    top = name.partition(".")[0]
    return top not in KNOWN_LIBRARIES | sys.stdlib_module_names | {"builtins"}


def asks_for_presence(value: Value) -> bool:
    """`batch is None`, `"mask" in batch`, `x.size(1)`, `waiting == []`: where a data set ends and
    what it has, ranks mostly agree."""
    if isinstance(value.call, Call) and value.call.result is value:
        return value.call.method in {"get", "size", "numel"}
    sign, *parts = value.operation or ("",)
    return sign in {"Is", "IsNot", "In", "NotIn"} or any(one.items == [] for one in parts)


def differentiated(program: Program) -> set[int]:
    """The losses of `(loss / n).backward()`, `scaler.scale(loss).backward()`, `backward(loss)`."""
    seen: set[int] = set()
    found = [one for call in program.backwards for one in (call.receiver, *call.args)]
    while found:
        value = found.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        found += [*value.options, *(value.operation or ())[1:]]
        if isinstance(value.call, Call) and value.call.method == "scale":
            found += value.call.args
    return seen


def decision_finding(
    program: Program, event: Event, guard: Guard, missed: Call, what: str, fix: str
) -> Finding:
    """A hint where the file does not show where the value is made that ranks differ in."""
    source = shown_source(program, event, guard)
    node = source.node if source is not None else None
    why = " and ".join(REASONS[one] for one in sorted(guard.divergent & DECISIONS))
    line = f" (line {getattr(node, 'lineno', 0)})" if node is not None else ""
    return program.finding(
        "rank-divergent-decision",
        guard,
        f"the condition depends on {why}{line}: {what}",
        fix,
        seen=(missed,) if node is None else (node, missed),
        level=Severity.INFO if node is None else Severity.WARNING,
    )


def check_divergent_branches(program: Program, context: Context) -> Iterator[Finding]:
    """A collective, save or backward pass only where this rank's own value says so."""
    if not program.is_distributed:
        return
    reported: set[int] = set()
    for call in program.all_calls:
        if not needs_company(program, call) or rank_guard(call) is not None:
            continue
        for guard in call.guards:
            reasons = guard.divergent & DECISIONS
            if not reasons or guard.how == "exit" or id(guard.node) in reported:
                continue
            if both_sides(program, call, guard):
                continue
            reported.add(id(guard.node))
            yield decision_finding(
                program,
                call,
                guard,
                call,
                f"{call.name.rpartition('.')[2]} in {call.spot} needs every rank, and "
                "only some ranks call it",
                "reduce the value over the ranks first (`dist.all_reduce`), or broadcast rank "
                "0's decision, so that all take the same branch",
            )
            break


def both_sides(program: Program, call: Call, guard: Guard) -> bool:
    """Whether the other side of the branch makes the same call."""
    for other in program.all_calls:
        if other.name != call.name or other is call:
            continue
        if any(one.test is guard.test and one.holds is not guard.holds for one in other.guards):
            return True
    return False


def check_agreement_of_a_bool(program: Program, context: Context) -> Iterator[Finding]:
    """`all_reduce(should_skip)` of a Python bool raises; `if all_reduce(t):` never holds."""
    for call in program.calls("torch.distributed.all_reduce"):
        tensor = call.argument(0, "tensor")
        if tensor is not None and is_plain_number(tensor):
            what = "all_reduce takes a tensor; it gets a Python bool or number and raises"
            fix = (
                "`flag = torch.tensor(int(condition), device=device)`, reduce that, and "
                "branch on `flag.item()`"
            )
            yield program.finding("rank-divergent-decision", call, what, fix)
    for event in program.events:
        for guard in event.guards:
            made = guard.test.call
            if isinstance(made, Call) and made.name == "torch.distributed.all_reduce":
                what = "all_reduce returns None: this condition never holds"
                fix = "reduce in a line of its own, and branch on the tensor's `.item()`"
                yield program.finding("rank-divergent-decision", guard, what, fix)


def is_plain_number(value: Value) -> bool:
    """A bool, int or float of Python: literals, `not x`, and comparisons of `.item()`s."""
    if value.options:
        return all(is_plain_number(one) for one in value.any())
    if value.const is not UNKNOWN:
        return isinstance(value.const, bool | int | float)
    if isinstance(value.call, Call):
        name = value.call.name
        if name in {"builtins.bool", "builtins.int", "builtins.float", "builtins.any"}:
            return True
        return name.startswith("math.is") or value.call.method == "item"
    if value.operation is None:
        return False
    sign, *operands = value.operation
    if sign == "Not":
        return True
    return sign in COMPARISONS and all(is_plain_number(one) for one in operands)


COMPARISONS = frozenset(
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Or", "And", "Add", "Mult", "Div"}
)


RULES = (check_divergent_exits, check_divergent_branches, check_agreement_of_a_bool)

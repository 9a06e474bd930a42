"""Ranks that branch on what they alone see: files, their loss, their clock, their failure."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Event, Exit, Guard, Loop
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import DATA, TIME, Value
from paceline.check.lint.rules.agreement import joint_kind, rank_guard

REASONS = {DATA: "this rank's own batch or loss", TIME: "this rank's clock"}
"""What one rank alone knows."""


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
            guard,
            missed,
            f"a rank for which it holds `{leave.kind}`s in {leave.spot}, while the others go on to "
            f"{missed.name.rpartition('.')[2]} in {missed.spot} and wait for it",
            "decide together: `flag = torch.tensor(int(condition), device=device); "
            "dist.all_reduce(flag, op=dist.ReduceOp.MAX)`, then branch on `flag.item()`; or filter "
            "the data before the sampler",
        )


def decision(event: Event) -> Guard | None:
    """The innermost condition on what one rank alone knows, or on the rank."""
    for guard in reversed(event.guards):
        if guard.how != "decorator" and (guard.by_rank or guard.divergent & REASONS.keys()):
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


def decision_finding(program: Program, guard: Guard, missed: Call, what: str, fix: str) -> Finding:
    reasons = [why for reason, why in REASONS.items() if reason in guard.divergent]
    why = " and ".join(reasons or ["the rank"])
    what, level = f"the condition depends on {why}: {what}", Severity.INFO
    return program.finding("rank-divergent-decision", guard, what, fix, seen=(missed,), level=level)


def check_divergent_branches(program: Program, context: Context) -> Iterator[Finding]:
    """A collective, save or backward pass only where this rank's own value says so."""
    if not program.is_distributed:
        return
    reported: set[int] = set()
    for call in program.all_calls:
        if not needs_company(program, call) or rank_guard(call) is not None:
            continue
        for guard in call.guards:
            reasons = guard.divergent & REASONS.keys()
            if not reasons or guard.how == "exit" or id(guard.node) in reported:
                continue
            if both_sides(program, call, guard):
                continue
            reported.add(id(guard.node))
            yield decision_finding(
                program,
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
    """A bool or number of Python: a literal, `not x`, `bool(x)`, `x.item()`."""
    made = value.call
    if isinstance(made, Call):
        return made.name == "builtins.bool" or made.method == "item"
    return isinstance(value.const, bool | int | float) or (value.operation or ("",))[0] == "Not"


RULES = (check_divergent_exits, check_divergent_branches, check_agreement_of_a_bool)

"""What is not there when it is used: on DDP's wrapper, or on all ranks but the main one."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Assign, Call, Guard
from paceline.check.lint.facts.names import DDP
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.source import path_of
from paceline.check.lint.facts.values import Value
from paceline.check.lint.words import words_of

_METHODS = words_of("python", "ddp_methods")
"""Methods of torch.nn.Module and DistributedDataParallel: what the wrapper itself answers."""


def check_wrapper_methods(program: Program, context: Context) -> Iterator[Finding]:
    """`ddp.generate(...)`: the wrapper passes the forward pass on and nothing else."""
    given = {one.attribute for one in program.assigns if one.attribute is not None}
    reported: set[int] = set()
    for call in program.all_calls:
        model = call.receiver
        if call.method is None or model is None or call.method in _METHODS or call.method in given:
            continue
        wrap = wrapping(model, call)
        if wrap is None or id(call.node) in reported or asks_for(model, call.guards):
            continue
        if wrap.guards and path_of(wrap.node) != path_of(call.node):
            continue  # this program may never come to that condition
        reported.add(id(call.node))
        when = " in a run of several ranks" if wrap.guards else ""
        what = (
            f"{wrap.spot} wraps the model{when}, and "
            f"DistributedDataParallel has no method {call.method}: AttributeError"
        )
        fix = f"call .module.{call.method}(...), or keep a name for the plain model"
        level = Severity.WARNING if wrap.guards else Severity.ERROR
        yield program.finding("ddp-method-missing", call, what, fix, seen=(wrap,), level=level)


def wrapping(model: Value, use: Call) -> Call | None:
    """The DDP(...) call that surely made it where it is used in a run of several ranks."""
    others = any(one.wrapper not in (None, "ddp") for one in model.any())
    if others and any(compares_text(guard.test) for guard in use.guards):
        return None  # it may be the other wrapper's method, where that condition chooses it
    for one, chosen in choices(model):
        made = one.call
        if not isinstance(made, Call) or made.name != DDP or made.result is not one:
            continue
        if made.root != use.root or any(asks_kind(test) for test, _ in chosen):
            continue
        sides = [(guard.test, guard.holds) for guard in use.guards] + chosen
        if not any(
            excludes(guard.test, guard.holds, *side) for guard in made.guards for side in sides
        ):
            return made
    return None


def choices(value: Value) -> Iterator[tuple[Value, list[tuple[Value, bool]]]]:
    """What it may be, each with the conditions under which it is that."""
    if not value.options:
        yield value, []
    for place, option in enumerate(value.options):
        for one, chosen in choices(option):
            here = [] if value.test is None else [(value.test, place == 0)]
            yield one, [*here, *chosen]


def excludes(first: Value, holds: bool, second: Value, also: bool) -> bool:
    """Whether two conditions cannot both be as they have to."""
    (first, holds), (second, also) = without_not(first, holds), without_not(second, also)
    if first is second or written(first) == written(second) is not None:
        return holds is not also
    (sign, *parts), (other, *others) = first.operation or ("",), second.operation or ("",)
    if sign != "Eq" or other != "Eq" or not (holds and also):
        return False
    return written(parts[0]) == written(others[0]) and parts[1].const != others[1].const


def compares_text(test: Value) -> bool:
    return any(
        one.operation is not None and any(isinstance(part.const, str) for part in one.operation[1:])
        for one in test.origins()
    )


def without_not(test: Value, holds: bool) -> tuple[Value, bool]:
    while test.operation is not None and test.operation[0] == "Not":
        test, holds = test.operation[1], not holds
    return test, holds


def written(value: Value) -> str | None:
    return value.label or (ast.unparse(value.node) if value.node is not None else None)


_ASKING = frozenset({"builtins.isinstance", "builtins.hasattr"})


def asks_kind(test: Value) -> bool:
    return any((one.instance or "") in _ASKING for one in test.origins())


def asks_for(value: Value, guards: tuple[Guard, ...]) -> bool:
    """Whether a condition asks what a value is, or whether it is there."""
    parts = {id(one) for one in (value, *value.any())}
    tests = [guard.test for guard in guards]
    return any(asks_kind(one) for one in tests) or any(
        id(one) in parts for test in tests for one in test.origins()
    )


def check_main_only(program: Program, context: Context) -> Iterator[Finding]:
    """`ema = EMA(model) if rank == 0 else None`, and `ema.update()` on every rank."""
    reported: set[int] = set()
    for event in program.events:
        if not isinstance(event, Call | Assign):
            continue
        value, name = event.owner, event.method if isinstance(event, Call) else event.attribute
        test = value.test if value is not None and len(value.options) == 2 else None
        if value is None or test is None or test.main is None or id(value) in reported:
            continue
        held, other = value.options if test.main else value.options[::-1]
        if other.const is not None or held.const is None or held.options or held.call is None:
            continue
        here = [one for one in event.guards if one.depth == len(event.frames)]
        if any(one.by_rank for one in event.guards) or any(one.how != "exit" for one in here):
            continue  # not every run gets here, or not every rank
        reported.add(id(value))
        where = held.call.spot if isinstance(held.call, Call) else "an earlier line"
        what = (
            f"{value.label or 'this'} is made on the main process alone ({where}) and is None on "
            f"the others, which get here too: they have no {name}"
        )
        fix = "use it under the condition under which it is made, or make it on every rank"
        seen = (held.call,) if isinstance(held.call, Call) else ()
        yield program.finding("main-process-only-value", event, what, fix, seen=seen)


RULES = (check_wrapper_methods, check_main_only)

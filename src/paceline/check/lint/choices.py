"""What a name holds where two branches gave it a value, and what a condition leaves of that.

model = DDP(model) if ddp else model        # either
plain = model.module if ddp else model      # of the second, `not ddp` leaves the plain one
"""

from paceline.check.lint.names import DATA_PARALLEL, DDP, FSDP
from paceline.check.lint.values import UNKNOWN, Value

ASKS_FOR_MANY = frozenset({"torch.distributed.is_initialized", "torch.distributed.is_available"})


def implies_alone(test: Value, holds: bool) -> bool:
    """Whether a condition that holds, or not, means that there is one process only."""
    if test.alone is not None:
        return test.alone is holds
    if test.operation is None:
        return test.instance in ASKS_FOR_MANY and not holds
    sign, *parts = test.operation
    if sign == "Not":
        return implies_alone(parts[0], not holds)
    if sign == "And" and holds:
        return any(implies_alone(one, True) for one in parts)
    if sign == "Or" and not holds:
        return any(implies_alone(one, False) for one in parts)
    return False


MAX_OPTIONS = 24
"""A guess: what may be more than this many things is known no better by naming them all."""


def either(first: Value, second: Value, test: Value | None = None) -> Value:
    """One or the other, chosen by `test`; it depends on what the test depends on."""
    if first is second:
        return first
    if test is not None:
        first, second = left_of(first, test, True), left_of(second, test, False)
    if first is second:
        return first
    if test is not None and test.main is not None:
        sent, received = (first, second) if test.main else (second, first)
        if is_received(received, sent):
            return received
    if len(list(first.any())) + len(list(second.any())) > MAX_OPTIONS:
        first, second = next(first.any()), next(second.any())
    taints = first.taints | second.taints | (test.taints if test is not None else frozenset())
    if test is not None and implies_alone(test, True):
        taints = second.taints | test.taints
    elif test is not None and implies_alone(test, False):
        taints = first.taints | test.taints
    return Value(
        options=(first, second),
        test=test,
        taints=taints,
        main=_chosen_main(first, second, test),
        kind=first.kind or second.kind,
        wrapper=first.wrapper or second.wrapper,
        node=first.node,
        label=first.label or second.label,
    )


def is_received(value: Value, sent: Value) -> bool:
    """Whether a broadcast put the main process's value there: `if rank != 0: stop = flags[0]`."""
    if value.divergent or value.call is not None or len(value.sources) != 1:
        return False
    held = list(value.sources[0].any())
    return all(one in held for one in sent.any())


def _chosen_main(first: Value, second: Value, test: Value | None) -> bool | None:
    """`x if is_main else None` is true on the main process alone."""
    if test is not None and test.main is not None:
        falsy = [one.const is not UNKNOWN and not one.const for one in (first, second)]
        if falsy == [False, True]:
            return test.main
        if falsy == [True, False]:
            return not test.main
    return _shared(first.main, second.main)


def _shared(first: bool | None, second: bool | None) -> bool | None:
    if first is None or second is None:
        return first if second is None else second
    return first if first == second else None


WRAPPER_OF = {
    DDP: "ddp",
    FSDP: "fsdp1",
    DATA_PARALLEL: "dp",
    "deepspeed.DeepSpeedEngine": "deepspeed",
}
"""Classes that programs ask for with `isinstance` -> `Value.wrapper`."""


def left_of(value: Value, test: Value, holds: bool, depth: int = 8) -> Value:
    """What a model may still be where a condition holds, or does not; itself if that says nothing.

    Other values stay as they are: rules tell by identity that a number is the same in two places.
    The condition may be the one that chose among its options, or ask what it is:
    `isinstance(model, DDP)`, `hasattr(model, "module")`.
    """
    if value.wrapper is None or not value.options or depth == 0:
        return value
    if test.operation is not None:
        sign, *parts = test.operation
        if sign == "Not":
            return left_of(value, parts[0], not holds, depth - 1)
        if sign == ("And" if holds else "Or"):
            for part in parts:
                value = left_of(value, part, holds, depth - 1)
            return value
    same = None if value.test is None else says_of(test, value.test)
    if same is not None:
        return left_of(value.options[0 if same is holds else 1], test, holds, depth - 1)
    if asks_about(test, value):
        kept = [one for one in value.any() if is_so(test, one) in {None, holds}]
        return kept[0] if len(kept) == 1 else value
    first, second = (left_of(one, test, holds, depth - 1) for one in value.options)
    if first is second:
        return first
    if (first, second) == value.options:
        return value
    return either(first, second, value.test)


def says_of(test: Value, other: Value, depth: int = 4) -> bool | None:
    """True where two conditions are one, False where one is the other's opposite."""
    if test is other:
        return True
    if depth == 0:
        return None
    for one, rest in ((test, other), (other, test)):
        if one.operation is not None and one.operation[0] == "Not":
            inner = says_of(one.operation[1], rest, depth - 1)
            return None if inner is None else not inner
    many, others = runs_alone(test), runs_alone(other)
    if many is not None and others is not None:
        return many is others
    return True if alike(test, other, depth) else None


def runs_alone(test: Value) -> bool | None:
    """Whether a condition is true of a run of one process (True), or of one of many (False)."""
    return False if test.instance in ASKS_FOR_MANY else test.alone


def alike(first: Value, second: Value, depth: int) -> bool:
    """Whether two expressions read alike: one comparison of the same things, written twice."""
    if first is second:
        return True
    if first.const is not UNKNOWN or second.const is not UNKNOWN:
        return type(first.const) is type(second.const) and first.const == second.const
    if depth == 0 or first.operation is None or second.operation is None:
        return False
    if first.operation[0] != second.operation[0] or len(first.operation) != len(second.operation):
        return False
    pairs = zip(first.operation[1:], second.operation[1:], strict=True)
    return all(alike(one, other, depth - 1) for one, other in pairs)


def asks_about(test: Value, value: Value) -> bool:
    """Whether a condition asks what this very value is."""
    if test.instance not in {"builtins.isinstance", "builtins.hasattr"} or len(test.sources) != 2:
        return False
    asked = test.sources[0]
    return asked is value or set(value.any()) <= set(asked.any())


def is_so(test: Value, one: Value) -> bool | None:
    """What `isinstance(one, DDP)` or `hasattr(one, "module")` gives; None if reading cannot say."""
    if one.kind != "model":
        return None
    asked = test.sources[1]
    if test.instance == "builtins.hasattr":
        return one.wrapper is not None if asked.const == "module" else None
    wanted = {WRAPPER_OF.get(each.name or "") for each in asked.items or [asked]}
    if one.wrapper in wanted - {None}:
        return True
    return None if None in wanted else False


def one_of(parts: list[Value], test: Value | None) -> Value:
    made = parts[0]
    for part in parts[1:]:
        made = either(made, part, test)
    return made

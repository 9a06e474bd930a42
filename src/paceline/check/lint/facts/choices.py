"""What a name holds where two branches gave it a value: `model = DDP(model) if ddp else model`."""

from paceline.check.lint.facts.values import UNKNOWN, Value

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


def one_of(parts: list[Value], test: Value | None) -> Value:
    made = parts[0]
    for part in parts[1:]:
        made = either(made, part, test)
    return made

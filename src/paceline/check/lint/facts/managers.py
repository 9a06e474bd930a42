"""What `with` enters: library managers as they are, own ones with what they enter in turn."""

from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.values import Value
from paceline.check.lint.facts.walker import Walker


def enter(walk: Walker, manager: Value) -> Value:
    """Put a manager around what follows, and what own code enters for it; what `as` gives."""
    walk.withs.append(manager)
    if manager.kind == "stream" and is_generator_manager(manager):
        walk.withs += manager.fields["within"].items or ()
        return manager.fields["*"]
    method = manager.of_class.method("__enter__") if manager.of_class is not None else None
    if method is None:
        return manager
    first = len(walk.events)
    held = walk.enter(method, [manager], {}, None)
    walk.withs += [
        one.receiver
        for one in walk.events[first:]
        if isinstance(one, Call) and one.method == "__enter__" and one.receiver is not None
    ]
    return held


def is_generator_manager(manager: Value) -> bool:
    made = manager.call
    return (
        isinstance(made, Call)
        and made.own is not None
        and made.own.has_decorator("contextmanager")
        and "within" in manager.fields
    )


def leave(walk: Walker, manager: Value) -> None:
    """Walk through what an own class does at the end of a `with`."""
    method = manager.of_class.method("__exit__") if manager.of_class is not None else None
    if method is not None:
        nothing = [Value(const=None) for _ in range(3)]
        walk.enter(method, [manager, *nothing], {}, None)

"""What a loop runs over, and one element of it."""

import ast

from paceline.check.lint.facts.choices import one_of
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DATALOADER
from paceline.check.lint.facts.values import ALIKE, DATA, Value, all_taints
from paceline.check.lint.facts.walker import Walker
from paceline.check.lint.words import words_of

PASSED_ON = words_of("python", "passed_on")
"""Calls that iterate over what they are given, in some order."""


def elements(walk: Walker, iterated: Value, node: ast.AST) -> tuple[Value, Value]:
    """What a loop runs over once `enumerate` and the like are taken off, and one element of it."""
    if iterated.options:
        sides = [elements(walk, one, node) for one in iterated.any()]
        return max(sides, key=lambda side: side[0].kind is not None)
    call = iterated.call
    if isinstance(call, Call) and call.args:
        first = call.args[0]
        if call.name in PASSED_ON:
            return elements(walk, first, node)
        if call.name == "builtins.enumerate":
            over, element = elements(walk, first, node)
            return over, Value(items=[Value(kind="counter", node=node), element], node=node)
        if call.name == "builtins.zip":
            pairs = [elements(walk, one, node) for one in call.args]
            over = next((one for one, _ in pairs if one.kind == "loader"), pairs[0][0])
            return over, Value(items=[one for _, one in pairs], node=node)
        if call.name in {"builtins.range", "tqdm.trange", "tqdm.auto.trange"}:
            return range_of(call, node)
    if iterated.items is not None:
        options = list(iterated.items)
        return iterated, one_of(options, None) if options else Value()
    if "*" in iterated.fields:
        return iterated, iterated.fields["*"]
    return iterated, element_of(iterated, node)


def range_of(call: Call, node: ast.AST) -> tuple[Value, Value]:
    taints = all_taints(call.args)
    whole = Value(kind="counter", sources=call.args, taints=taints, call=call, node=call.node)
    counter = Value(
        kind="counter", taints=taints - {"shape", "count"}, node=node, sources=call.args
    )
    return whole, counter


def element_of(iterated: Value, node: ast.AST) -> Value:
    made = Value(element_of=iterated, taints=iterated.taints, node=node)
    if iterated.has_kind("loader"):
        made.kind = "batch"
        made.taints |= {ALIKE} if same_on_all_ranks(iterated) else {DATA}
    elif iterated.has_kind("dataset"):
        made.kind, made.taints = "batch", made.taints | {DATA}
    elif iterated.kind in {"batch", "model"}:
        made.kind = iterated.kind
    return made


def same_on_all_ranks(loader: Value) -> bool:
    """A loader that gives every rank the same batches in the same order: no sampler, no shuffle."""
    made = loader.call
    if not isinstance(made, Call) or made.name != DATALOADER or made.open_ended:
        return False
    if made.argument(3, "sampler") or made.argument(4, "batch_sampler"):
        return False
    shuffle = made.argument(2, "shuffle")
    if shuffle is not None and shuffle.const is not False:
        return False
    data = made.argument(0, "dataset")
    if data is None or data.divergent or data.kind != "dataset":
        return False
    own = data.of_class
    return own is None or own.method("__getitem__") is not None


def unpacked(value: Value, count: int, starred: int | None = None) -> list[Value]:
    """The parts of a value that is unpacked into `count` names; one of them takes the rest."""
    if starred is not None and value.items is not None and len(value.items) >= count - 1:
        end = len(value.items) - (count - 1 - starred)
        rest = value.items[starred:end]
        return [*value.items[:starred], Value(items=rest), *value.items[end:]]
    if value.items is not None and len(value.items) == count:
        return value.items
    if value.options:
        columns = [unpacked(one, count) for one in value.any()]
        return [one_of(list(parts), value.test) for parts in zip(*columns, strict=True)]
    parts = []
    for index in range(count):
        key = f"[{index}]"
        if key not in value.fields:
            value.fields[key] = Value(
                node=value.node,
                sources=(value,),
                taints=value.taints,
                kind="batch" if value.kind == "batch" else None,
            )
        parts.append(value.fields[key])
    return parts

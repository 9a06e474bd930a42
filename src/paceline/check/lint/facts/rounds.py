"""What a round of a loop leaves for the next one: `stop = loss < 0.1`, read as `if stop: break`."""

import ast
from collections.abc import Sequence
from typing import Any

from paceline.check.lint.facts.choices import either
from paceline.check.lint.facts.values import DIVERGENT, Value
from paceline.check.lint.facts.walker import Trial, Walker


def carry(walk: Walker, loop: ast.For | ast.AsyncFor | ast.While) -> None:
    """Have names and attributes hold what a round leaves for the next one, too.

    The body is walked for this alone: what happens in it is not noted. Only what may differ between
    ranks afterwards, and did not before, is joined with what was there.
    """
    if walk.trial is not None:
        return
    read = getattr(loop, "carried", None)
    if read is None:
        read = carried(loop.body, loop.test if isinstance(loop, ast.While) else None)
        loop.carried = read  # type: ignore[union-attr]
    if not read:
        return
    walk.trial = trial = Trial()
    names, guards = walk.scope.names, len(walk.guards)
    lists: tuple[list[Any], ...] = (walk.events, walk.functions, walk.classes, *walk.returned)
    marks, foreign = [len(one) for one in lists], walk.foreign
    walk.scope.names = dict(names)
    walk.block(loop.body)
    after, walk.scope.names, walk.trial, walk.foreign = walk.scope.names, names, None, foreign
    for one, mark in zip(lists, marks, strict=True):
        del one[mark:]
    del walk.guards[guards:]
    for function, runs in trial.runs.items():
        function.runs = runs
    for (_, attribute), (owner, old) in trial.fields.items():
        left = owner.fields.pop(attribute, None)
        if old is not None:
            owner.fields[attribute] = rejoined(old, left) if attribute in read else old
    for name in read:
        before = walk.scope.find(name)
        if before is not None:
            joined = rejoined(before, after.get(name))
            if joined is not before:
                walk.bind(name, joined)


def carried(body: Sequence[ast.stmt], test: ast.expr | None) -> set[str]:
    """Names and attributes that a loop reads before its body has assigned them."""
    assigned: dict[str, tuple[int, int]] = {}
    read: dict[str, tuple[int, int]] = {}
    roots = [*([] if test is None else [test]), *body]
    for node in (one for root in roots for one in ast.walk(root)):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            place = (node.lineno, node.col_offset)
            kept = read if isinstance(node.ctx, ast.Load) else assigned
            kept[name] = min(kept.get(name, place), place)
    return {name for name, place in assigned.items() if read.get(name, place) < place}


def rejoined(old: Value, left: Value | None) -> Value:
    """What a name may hold in any round of a loop, before which it was `old`."""
    if left is None or old.kind == "counter" or not (left.taints - old.taints) & DIVERGENT:
        return old
    return either(old, left)

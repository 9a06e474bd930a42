"""Numbers that a loop counts up: names (`step += 1`) and attributes (`self.count += 1`)."""

import ast
from collections.abc import Iterator, Sequence

from paceline.check.lint.facts.events import Class
from paceline.check.lint.facts.values import DATA, Value
from paceline.check.lint.facts.walker import Walker


def count_up(walk: Walker, body: Sequence[ast.stmt]) -> None:
    """What a loop's body counts up is a counter from the loop's first line on."""
    for target in increments(body):
        if isinstance(target, ast.Name):
            old = walk.scope.find(target.id)
            if old is None or old.kind != "counter":
                walk.bind(target.id, counter(old, target.id))
        elif isinstance(target, ast.Attribute):
            owner = walk.looked_up(target.value)
            for one in owner.any() if owner is not None else ():
                old = one.fields.get(target.attr)
                if old is not None and is_whole(old):
                    one.fields[target.attr] = counter(old, target.attr)


def count_in_methods(own_class: Class, instance: Value) -> None:
    """What the methods of an own class count up, from what its `__init__` set on."""
    for part in own_class.ancestors():
        for name, method in part.methods.items():
            if name in {"__init__", "__post_init__"}:
                continue
            for target in increments([method.node]):
                if not isinstance(target, ast.Attribute) or ast.unparse(target.value) != "self":
                    continue
                old = instance.fields.get(target.attr)
                if old is not None and is_whole(old):
                    instance.fields[target.attr] = counter(old, target.attr)


def is_whole(value: Value) -> bool:
    return type(value.const) is int


def counter(old: Value | None, label: str) -> Value:
    taints = old.taints - {DATA} if old is not None else frozenset()
    return Value(kind="counter", label=label, taints=taints)


def increments(body: "Sequence[ast.AST]") -> Iterator[ast.expr]:
    """What `+=` of a literal whole number is applied to."""
    for statement in body:
        known = getattr(statement, "increments", None)
        if known is None:
            known = list(_increments_in(statement))
            statement.increments = known  # type: ignore[attr-defined]
        yield from known


def _increments_in(statement: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            by = node.value
            if isinstance(by, ast.Constant) and isinstance(by.value, int):
                yield node.target

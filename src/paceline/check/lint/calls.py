"""A call: noted, followed into own functions, or given its known effect; and its qualified name."""

import ast
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.check.lint import expressions, follow
from paceline.check.lint.events import Call
from paceline.check.lint.names import (
    canonical,
)
from paceline.check.lint.values import Value

if TYPE_CHECKING:
    from paceline.check.lint.walk import Walk


def call(walk: "Walk", node: ast.Call) -> Value:
    """A call: noted, then followed into own functions, or given its known effect."""
    callee = expressions.evaluate(walk, node.func)
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    open_ended = False
    for one in node.args:
        value = expressions.evaluate(walk, one)
        if isinstance(one, ast.Starred):
            if value.items is not None:
                args += value.items
                continue
            open_ended = True
        args.append(value)
    nodes: dict[str, ast.AST] = {}
    for keyword in node.keywords:
        value = expressions.evaluate(walk, keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg], nodes[keyword.arg] = value, keyword
        elif value.entries is not None:
            kwargs.update(value.entries)
            open_ended = open_ended or value.attribute == "open"
        else:
            open_ended = True
            args_value = value
            kwargs.setdefault("**", args_value)
    receiver = callee.receiver
    method = node.func.attr if isinstance(node.func, ast.Attribute) else None
    if isinstance(node.func, ast.Attribute) and receiver is None:
        receiver = evaluate_quietly(walk, node.func.value)
    if method is None and is_bound_method(callee):
        method = callee.attribute
    made = Call(
        name=call_name(callee, receiver, method),
        callee=callee,
        receiver=receiver,
        method=method,
        args=tuple(args),
        kwargs=kwargs,
        keyword_nodes=nodes,
        open_ended=open_ended,
        **walk.context(node),
    )
    walk.note_call(made)
    made.result = follow.called(walk, made)
    if made.result.call is None and not made.result.options:
        made.result.call = made
    return made.result


def is_bound_method(callee: Value) -> bool:
    """`save = accelerator.save_state`, called by that name: a method of a library's object."""
    owner = callee.receiver
    if owner is None or callee.options or callee.kind is not None or callee.name is not None:
        return False
    return owner.instance is not None or owner.kind is not None


def evaluate_quietly(walk: "Walk", node: ast.AST) -> Value | None:
    """The receiver of a method whose callee did not keep it: a plain look-up, noting nothing."""
    if isinstance(node, ast.Name):
        return walk.scope.find(node.id)
    if isinstance(node, ast.Attribute):
        base = evaluate_quietly(walk, node.value)
        return None if base is None else expressions.attribute_of(walk, base, node.attr, node)
    return None


def call_name(callee: Value, receiver: Value | None, method: str | None) -> str:
    """Qualified name of what is called."""
    for one in callee.any():
        if one.name is not None:
            return one.name
        if one.function is not None:
            function = one.function
            inside = f"{function.own_class.name}." if function.own_class is not None else ""
            return f"own.{inside}{function.name}"
        if one.own_class is not None:
            return f"own.{one.own_class.name}"
    if method is not None and receiver is not None:
        for one in receiver.any():
            if one.instance is not None:
                return canonical(f"{one.instance}.{method}")
        for one in receiver.any():
            if one.kind in CLASS_OF_KIND:
                return f"{CLASS_OF_KIND[one.kind]}.{method}"
    return f"?.{method}" if method is not None else "?"


CLASS_OF_KIND = {
    "accelerator": "accelerate.Accelerator",
    "fabric": "lightning.fabric.Fabric",
    "sampler": "torch.utils.data.Sampler",
    "engine": "deepspeed.DeepSpeedEngine",
}
"""The class behind names like `accelerator`, where a parameter's type is not seen."""


HANDLERS: Mapping[type[ast.AST], Callable[["Walk", Any], Value]] = {ast.Call: call}

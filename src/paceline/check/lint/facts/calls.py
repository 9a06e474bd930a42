"""A call: noted, followed into own functions, or given its known effect; and its qualified name."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from paceline.check.lint.facts import follow
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.values import Value
from paceline.check.lint.facts.walker import Walker


def call(walk: Walker, node: ast.Call) -> Value:
    """A call: noted, then followed into own functions, or given its known effect."""
    callee = walk.value(node.func)
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    open_ended = False
    for one in node.args:
        value = walk.value(one)
        if isinstance(one, ast.Starred):
            if value.items is not None:
                args += value.items
                continue
            open_ended = True
        args.append(value)
    nodes: dict[str, ast.AST] = {}
    for keyword in node.keywords:
        value = walk.value(keyword.value)
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
        receiver = walk.looked_up(node.func.value)
    if method is None and is_bound_method(callee):
        method = callee.attribute
    made = Call(
        name=follow.call_name(callee, receiver, method),
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


HANDLERS: Mapping[type[ast.AST], Callable[[Walker, Any], Value]] = {ast.Call: call}

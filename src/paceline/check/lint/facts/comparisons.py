"""What `and`, `or`, `not` and comparisons hold: conditions on ranks above all."""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from paceline.check.lint.facts.events import Guard, is_rank_number
from paceline.check.lint.facts.values import DATA, RANK, UNKNOWN, Value, all_taints, computed
from paceline.check.lint.facts.walker import Walker


def boolean(walk: Walker, node: ast.BoolOp) -> Value:
    sign = type(node.op).__name__
    parts: list[Value] = []
    mark = len(walk.guards)
    for one in node.values:
        part = walk.value(one)
        parts.append(part)
        walk.guards.append(Guard(part, node, sign == "And", "if", len(walk.frames)))
    del walk.guards[mark:]
    main = next((one.main for one in parts if one.main is not None), None)
    made = Value(node=node, sources=tuple(parts), taints=all_taints(parts), main=main)
    made.operation = (sign, *parts)
    if sign == "Or":
        made.main = (
            main if all(one.main is not None or not one.divergent for one in parts) else None
        )
    decides = sign == "Or"
    flags = [one for one, at in zip(parts, node.values, strict=True) if is_flag(at)]
    if any(one.const is decides and one.settled for one in flags):
        made.const, made.settled = decides, True
    things = [one for one in parts[:-1] if may_be_chosen(one, sign)]
    if is_thing(parts[-1]):
        made.options = (*things, parts[-1]) if sign == "Or" else (parts[-1], *things)
        made.test = parts[0] if len(parts) == 2 else None
    return made


def is_flag(node: ast.expr) -> bool:
    """`evaluate`, `not evaluate`."""
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Name)


def may_be_chosen(value: Value, sign: str) -> bool:
    """Whether `value or other` may be the value; a parameter left at None is not."""
    if value.const is UNKNOWN:
        return value.default is not None or sign == "And"
    return bool(value.const) is (sign == "Or")


def is_thing(value: Value) -> bool:
    """Whether `x or value` chooses an object or a text, and is no condition."""
    if value.of_class is not None or value.function is not None or value.own_class is not None:
        return True
    return value.kind in THINGS or isinstance(value.likely(), str)


def is_object(value: Value) -> bool:
    """Whether a value is surely something: an instance, or a model that a call made."""
    return value.of_class is not None or (value.kind in THINGS and value.call is not None)


THINGS = frozenset({"model", "loader", "sampler", "dataset", "optimizer", "scheduler", "device"})


def unary(walk: Walker, node: ast.UnaryOp) -> Value:
    part = walk.value(node.operand)
    sign = type(node.op).__name__
    made = Value(node=node, sources=(part,), taints=part.taints, operation=(sign, part))
    if sign == "Not":
        if part.main is not None:
            made.main = not part.main
        elif part.operation is None and not part.options and is_rank_number(part):
            made.main = True
        if isinstance(part.const, bool):
            made.const = not part.const
            made.settled = is_settled(walk, node.operand, part)
    if sign == "USub" and isinstance(part.const, int | float):
        made.const = -part.const
    return made


def compare(walk: Walker, node: ast.Compare) -> Value:
    parts = [walk.value(node.left), *(walk.value(one) for one in node.comparators)]
    made = Value(node=node, sources=tuple(parts), taints=all_taints(parts))
    if len(parts) != 2:
        return made
    left, right = parts
    sign = type(node.ops[0]).__name__
    settled = any(is_parameter(walk, one) for one in (node.left, node.comparators[0]))
    if sign in {"Eq", "NotEq"} and isinstance(left.const, str) and isinstance(right.const, str):
        made.const, made.settled = (left.const == right.const) is (sign == "Eq"), settled
    elif settled and not made.divergent:
        made.const = of_constants(sign, left, right)
        made.settled = made.const is not UNKNOWN
    made.operation = (sign, left, right)
    made.alone = alone(sign, left, right)
    if sign in {"Is", "IsNot"} and right.const is None:
        if settled and all(is_object(one) for one in left.any()):
            made.const, made.settled = sign == "IsNot", True
        if left.options:
            made.main = left.main if sign == "IsNot" or left.main is None else not left.main
        else:
            made.taints -= {RANK}
        if left.kind != "batch":
            made.taints -= {DATA}
        return made
    if sign in {"In", "NotIn"} and isinstance(left.const, str):
        made.taints -= {DATA}
    every_few = any(one.operation is not None and one.operation[0] == "Mod" for one in parts)
    if (
        "count" in made.taints
        and not every_few
        and any(type(one.const) is int and one.const in {0, 1} for one in parts)
    ):
        made.taints |= {DATA}
    if is_rank(left) or (RANK in left.taints and has_minus_one(right)):
        rank_comparison(made, sign, left, right)
    elif is_rank(right) and sign in {"Eq", "NotEq"}:
        rank_comparison(made, sign, right, left)
    elif left.main is not None and isinstance(right.const, bool):
        made.main = left.main if (sign in {"Eq", "Is"}) is right.const else not left.main
    return made


def of_constants(sign: str, left: Value, right: Value) -> Any:
    """What a comparison of two numbers, or of a number with a list of them, gives."""
    numbers = [one.const for one in (right.items if right.items is not None else [right])]
    if any(type(one) not in {int, float} for one in (left.const, *numbers)):
        return UNKNOWN
    if right.items is not None:
        return {"In": left.const in numbers, "NotIn": left.const not in numbers}.get(sign, UNKNOWN)
    return computed(sign, left.const, right.const)


def is_settled(walk: Walker, node: ast.expr, value: Value) -> bool:
    """Whether a condition holds, or not, throughout the call that is being walked."""
    return isinstance(value.const, bool) and (value.settled or is_parameter(walk, node))


def is_parameter(walk: Walker, node: ast.expr) -> bool:
    """Whether it is a parameter of the function, as its call passes it."""
    if not isinstance(node, ast.Name) or not walk.frames:
        return False
    return node.id in unbound_parameters(walk.frames[-1].function.node)


@lru_cache(maxsize=256)
def unbound_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Parameters to which the function's body gives no other value."""
    spec = function.args
    names = {one.arg for one in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]}
    return names - {
        one.id
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def alone(sign: str, left: Value, right: Value) -> bool | None:
    """Whether `world_size == 1` and the like say that there is one process only."""
    world = left.instance == "torch.distributed.get_world_size" or (
        left.attribute in {"WORLD_SIZE", "world_size"} or left.label.endswith("world_size")
    )
    if not world or not isinstance(right.const, int):
        return None
    if (sign, right.const) in {("Eq", 1), ("LtE", 1), ("Lt", 2)}:
        return True
    return False if (sign, right.const) in {("NotEq", 1), ("Gt", 1), ("GtE", 2)} else None


def is_rank(value: Value) -> bool:
    """Whether it is a rank itself, and not something computed by it or from data."""
    return value.main is None and is_rank_number(value)


def has_minus_one(value: Value) -> bool:
    """Whether it is -1, which stands for a run without ranks, or a list with it."""
    return any(one.const == -1 for one in (value, *(value.items or ())))


def rank_comparison(made: Value, sign: str, rank: Value, other: Value) -> None:
    """`rank == 0` is the main process; `local_rank != -1` asks whether the run is distributed."""
    if other.const is None or other.const == -1 or (sign, other.const) in {("GtE", 0), ("Lt", 0)}:
        made.taints -= {RANK}
        made.alone = {"Eq": True, "Lt": True, "NotEq": False, "GtE": False, "Gt": False}.get(sign)
        return
    numbers = {one.const for one in other.items} if other.items is not None else None
    if numbers is not None and numbers <= {-1, 0} and sign in {"In", "NotIn"}:
        made.main = sign == "In"
    elif (sign, other.const) in {("Eq", 0), ("LtE", 0), ("Lt", 1)} or (
        sign == "Eq" and other.const == "0"
    ):
        made.main = True
    elif (sign, other.const) in {("NotEq", 0), ("Gt", 0), ("GtE", 1)}:
        made.main = False


HANDLERS: Mapping[type[ast.AST], Callable[[Walker, Any], Value]] = {
    ast.BoolOp: boolean,
    ast.UnaryOp: unary,
    ast.Compare: compare,
}

"""What an expression holds, and the walking into own functions that its calls ask for."""

import ast
import builtins
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.check.lint import follow, imports, iteration
from paceline.check.lint.events import Call, Class, Function, Guard, Scope
from paceline.check.lint.names import (
    FILE_METHODS,
    MAIN_NAMES,
    RANK_ENVIRONMENT,
    RANK_NAMES,
    canonical,
    kind_by_name,
)
from paceline.check.lint.values import DATA, FILES, RANK, SHARD, UNKNOWN, Value, either

if TYPE_CHECKING:
    from paceline.check.lint.walk import Walk


SHAPES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda"})


def text(node: ast.AST | None) -> str:
    """The expression as source, in one line."""
    return "" if node is None else ast.unparse(node).split("\n")[0]


def evaluate(walk: "Walk", node: ast.AST | None) -> Value:
    """What an expression holds."""
    if node is None:
        return Value(const=None)
    handler = HANDLERS.get(type(node))
    value = handler(walk, node) if handler is not None else children(walk, node)
    if value.node is None:
        value.node = node
    return value


def children(walk: "Walk", node: ast.AST) -> Value:
    """An expression of which only its parts matter."""
    parts = tuple(evaluate(walk, one) for one in ast.iter_child_nodes(node) if is_value(one))
    return Value(node=node, sources=parts, taints=all_taints(parts))


def is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.expr | ast.FormattedValue)


def all_taints(parts: "tuple[Value, ...] | list[Value]") -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for one in parts:
        found |= one.taints
    return found


def constant(walk: "Walk", node: ast.Constant) -> Value:
    return Value(const=node.value, node=node)


def name(walk: "Walk", node: ast.Name) -> Value:
    found = walk.scope.find(node.id)
    if found is not None:
        return found if found.member is None else imports.member_of(walk, found)
    if node.id in BUILTINS:
        return Value(name=f"builtins.{node.id}", label=node.id)
    from paceline.check.lint.walk import parameter

    made = parameter(node.id, None)
    return walk.scope.module.names.setdefault(node.id, made)


BUILTINS = frozenset(dir(builtins))


def attribute(walk: "Walk", node: ast.Attribute) -> Value:
    return attribute_of(walk, evaluate(walk, node.value), node.attr, node)


def attribute_of(walk: "Walk", base: Value, attr: str, node: ast.AST | None) -> Value:
    """`base.attr`: what was assigned, a method, a part of a module, or an unknown of its own."""
    if attr in base.fields:
        return base.fields[attr]
    if base.file is not None:
        found = imports.attribute_of_file(walk, base, attr)
        if found is not None:
            return found
    if base.name is not None:
        return Value(name=canonical(f"{base.name}.{attr}"), label=f"{base.label}.{attr}", node=node)
    if base.options:
        made = one_of([attribute_of(walk, one, attr, node) for one in base.any()], base.test)
        if made.options:
            made.receiver, made.attribute = base, attr
        return made
    own = own_attribute(walk, base, attr, node)
    if own is not None:
        return own
    if attr == "module" and base.inner is not None:
        return base.inner
    made = Value(receiver=base, attribute=attr, node=node, label=f"{base.label}.{attr}".lstrip("."))
    made.taints = attribute_taints(base, attr)
    if attr in MAIN_NAMES:
        made.main = True
    if attr in RANK_NAMES or attr in MAIN_NAMES:
        made.taints |= {RANK}
    made.kind = attribute_kind(base, attr)
    if made.kind == "model" and base.kind == "model":
        made.inner = None
    base.fields[attr] = made
    return made


def attribute_taints(base: Value, attr: str) -> frozenset[str]:
    if attr in SHAPES:
        return frozenset({"shape"}) if attr == "shape" and DATA in base.taints else frozenset()
    if base.kind in {"parser", "model", "optimizer", "loader", "accelerator", "fabric"}:
        return frozenset()
    if base.kind == "namespace":
        return frozenset()
    return base.taints


def attribute_kind(base: Value, attr: str) -> str | None:
    if base.kind in {"batch", "output", "path", "namespace"}:
        return kind_by_name(attr) if base.kind == "namespace" else None
    return kind_by_name(attr)


def own_attribute(walk: "Walk", base: Value, attr: str, node: ast.AST | None) -> Value | None:
    """A method, property or class attribute of an instance of an own class, or of the class."""
    own_class = base.of_class or base.own_class
    if own_class is None:
        return None
    method = own_class.method(attr)
    if method is not None:
        bound = base if base.of_class is not None else None
        if bound is not None and method.has_decorator("property", "cached_property"):
            return follow.enter(walk, method, [bound], {}, None)
        if method.has_decorator("staticmethod"):
            bound = None
        return Value(function=method, receiver=bound, attribute=attr, label=f"{base.label}.{attr}")
    return class_attribute(own_class, attr)


def class_attribute(own_class: Class, name: str) -> Value | None:
    """What the body of an own class, or of one that it builds on, gives a name."""
    parts = (one.attributes for one in own_class.ancestors())
    return next((one[name] for one in parts if name in one), None)


def one_of(parts: list[Value], test: Value | None) -> Value:
    made = parts[0]
    for part in parts[1:]:
        made = either(made, part, test)
    return made


def subscript(walk: "Walk", node: ast.Subscript) -> Value:
    base, index = evaluate(walk, node.value), evaluate(walk, node.slice)
    items = base.items or []
    if isinstance(index.const, int) and -len(items) <= index.const < len(items):
        return items[index.const]
    if base.entries is not None and isinstance(index.const, str) and index.const in base.entries:
        return base.entries[index.const]
    if base.name == "os.environ" and isinstance(index.const, str):
        return environment(index.const, node)
    if base.name is not None and index.name is not None:
        return base
    taints = base.taints | index.taints
    if "shape" in base.taints:
        taints = frozenset() if index.const in {0, UNKNOWN} else frozenset({DATA})
    if RANK in index.taints and base.kind not in {"path"} and index.const is UNKNOWN:
        taints |= {SHARD}
    kind = "model" if base.kind == "model" else None
    if isinstance(node.slice, ast.Slice) and base.kind in {"dataset"}:
        kind = base.kind
    made = Value(node=node, sources=(base, index), taints=taints, kind=kind, receiver=base)
    made.attribute = index.const if isinstance(index.const, str) else None
    made.label = text(node)
    if isinstance(index.const, str):
        base.fields.setdefault(f"[{index.const}]", made)
        return base.fields[f"[{index.const}]"]
    return made


def environment(variable: str, node: ast.AST, default: Value | None = None) -> Value:
    made = Value(
        node=node, instance="os.environ", attribute=variable, label=f"os.environ[{variable!r}]"
    )
    if variable in RANK_ENVIRONMENT:
        made.taints = frozenset({RANK})
    if default is not None and default.const is not UNKNOWN:
        made.default = default.const
    return made


def slice_(walk: "Walk", node: ast.Slice) -> Value:
    parts = tuple(evaluate(walk, one) for one in (node.lower, node.upper, node.step) if one)
    return Value(node=node, sources=parts, taints=all_taints(parts))


def sequence(walk: "Walk", node: ast.Tuple | ast.List | ast.Set) -> Value:
    if any(isinstance(one, ast.Starred) for one in node.elts):
        parts = [evaluate(walk, one) for one in node.elts]
        return Value(node=node, sources=tuple(parts), taints=all_taints(parts))
    items = [evaluate(walk, one) for one in node.elts]
    consts = [one.const for one in items]
    const = UNKNOWN
    if items and all(one is not UNKNOWN for one in consts) and isinstance(node, ast.Tuple):
        const = tuple(consts)
    return Value(node=node, items=items, taints=all_taints(items), const=const)


def dictionary(walk: "Walk", node: ast.Dict) -> Value:
    entries: dict[str, Value] = {}
    others: list[Value] = []
    whole = True
    for key, item in zip(node.keys, node.values, strict=True):
        value = evaluate(walk, item)
        if key is None:
            if value.entries is not None:
                entries.update(value.entries)
            else:
                whole = False
                others.append(value)
            continue
        named = evaluate(walk, key)
        if isinstance(named.const, str):
            entries[named.const] = value
        else:
            others.append(value)
    made = Value(node=node, entries=entries, sources=tuple(others))
    made.taints = all_taints([*entries.values(), *others])
    if not whole:
        made.attribute = "open"
    return made


def boolean(walk: "Walk", node: ast.BoolOp) -> Value:
    sign = type(node.op).__name__
    parts: list[Value] = []
    mark = len(walk.guards)
    for one in node.values:
        part = evaluate(walk, one)
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
    things = [one for one in parts[:-1] if may_be_chosen(one, sign)]
    if is_thing(parts[-1]):
        made.options = (*things, parts[-1]) if sign == "Or" else (parts[-1], *things)
        made.test = parts[0] if len(parts) == 2 else None
    return made


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


THINGS = frozenset({"model", "loader", "sampler", "dataset", "optimizer", "scheduler", "device"})


def unary(walk: "Walk", node: ast.UnaryOp) -> Value:
    part = evaluate(walk, node.operand)
    sign = type(node.op).__name__
    made = Value(node=node, sources=(part,), taints=part.taints, operation=(sign, part))
    if sign == "Not":
        if part.main is not None:
            made.main = not part.main
        elif RANK in part.taints and part.operation is None and not part.options:
            made.main = True
        if isinstance(part.const, bool):
            made.const = not part.const
            made.settled = is_settled(walk, node.operand, part)
    if sign == "USub" and isinstance(part.const, int | float):
        made.const = -part.const
    return made


def binary_operation(walk: "Walk", node: ast.BinOp) -> Value:
    return binary(node, node.op, evaluate(walk, node.left), evaluate(walk, node.right))


def binary(node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
    """Arithmetic of two values; of two constants, the constant."""
    sign = type(op).__name__
    made = Value(
        node=node,
        sources=(left, right),
        taints=left.taints | right.taints,
        operation=(sign, left, right),
    )
    if left.kind == "path" or right.kind == "path":
        made.kind = "path"
    if left.items is not None and right.items is not None and sign == "Add":
        made.items = [*left.items, *right.items]
    consts = (left.const, right.const)
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in consts):
        from paceline.check.lint.values import at_iteration

        made.const = at_iteration(made, 0, {})
    return made


def compare(walk: "Walk", node: ast.Compare) -> Value:
    parts = [evaluate(walk, node.left), *(evaluate(walk, one) for one in node.comparators)]
    made = Value(node=node, sources=tuple(parts), taints=all_taints(parts))
    if len(parts) != 2:
        return made
    left, right = parts
    sign = type(node.ops[0]).__name__
    if sign in {"Eq", "NotEq"} and isinstance(left.const, str) and isinstance(right.const, str):
        made.const = (left.const == right.const) is (sign == "Eq")
        made.settled = is_parameter(walk, node.left) or is_parameter(walk, node.comparators[0])
    made.operation = (sign, left, right)
    made.alone = alone(sign, left, right)
    if sign in {"Is", "IsNot"} and right.const is None:
        if left.options:
            made.main = left.main if sign == "IsNot" or left.main is None else not left.main
        else:
            made.taints -= {RANK}
        if left.kind != "batch":
            made.taints -= {DATA, SHARD}
        return made
    if sign in {"In", "NotIn"} and isinstance(left.const, str):
        made.taints -= {DATA, SHARD}
    if "count" in made.taints and any(
        type(one.const) is int and one.const in {0, 1} for one in parts
    ):
        made.taints |= {DATA}
    if is_rank(left):
        rank_comparison(made, sign, left, right)
    elif is_rank(right) and sign in {"Eq", "NotEq"}:
        rank_comparison(made, sign, right, left)
    elif left.main is not None and isinstance(right.const, bool):
        made.main = left.main if (sign in {"Eq", "Is"}) is right.const else not left.main
    return made


def is_settled(walk: "Walk", node: ast.expr, value: Value) -> bool:
    """Whether a condition holds, or not, throughout the call that is being walked."""
    return isinstance(value.const, bool) and (value.settled or is_parameter(walk, node))


def is_parameter(walk: "Walk", node: ast.expr) -> bool:
    """Whether it is a parameter of the function, as its call passes it."""
    if not isinstance(node, ast.Name) or not walk.frames:
        return False
    function = walk.frames[-1].function.node
    spec = function.args
    names = {one.arg for one in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]}
    return node.id in names and not is_bound_again(function, node.id)


def is_bound_again(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        for one in ast.walk(function)
    )


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
    if RANK not in value.taints or value.main is not None:
        return False
    return not value.taints & {DATA, SHARD, FILES} and all(
        one.const is not UNKNOWN or (one.operation is None and one.kind not in {"batch", "output"})
        for one in value.any()
    )


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


def conditional(walk: "Walk", node: ast.IfExp) -> Value:
    test = evaluate(walk, node.test)
    if is_settled(walk, node.test, test):
        return evaluate(walk, node.body if test.const else node.orelse)
    mark = len(walk.guards)
    parts = []
    for holds, one in ((True, node.body), (False, node.orelse)):
        walk.guards.append(Guard(test, node, holds, "if", len(walk.frames)))
        parts.append(evaluate(walk, one))
        del walk.guards[mark:]
    made = either(parts[0], parts[1], test)
    if made.node is parts[0].node:
        made.node = node
    return made


def comprehension(
    walk: "Walk", node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
) -> Value:
    from paceline.check.lint.events import Loop

    outer, walk.scope = walk.scope, Scope(outer=walk.scope)
    loops, mark = len(walk.loops), len(walk.guards)
    sources: list[Value] = []
    for generator in node.generators:
        over, element = iteration.elements(walk, evaluate(walk, generator.iter), node)
        walk.loops.append(Loop(node, over, (), len(walk.frames), over.kind == "counter"))
        walk.assign(generator.target, element, node)
        sources += [over]
        for condition in generator.ifs:
            test = evaluate(walk, condition)
            sources.append(test)
            walk.guards.append(Guard(test, node, True, "if", len(walk.frames)))
    if isinstance(node, ast.DictComp):
        parts = [evaluate(walk, node.key), evaluate(walk, node.value)]
    else:
        parts = [evaluate(walk, node.elt)]
    del walk.loops[loops:]
    del walk.guards[mark:]
    walk.scope = outer
    everything = (*sources, *parts)
    made = Value(node=node, sources=everything, taints=all_taints(everything))
    if not isinstance(node, ast.DictComp):
        made.attribute = "comprehension"
        made.fields["*"] = parts[0]
    return made


def lambda_(walk: "Walk", node: ast.Lambda) -> Value:
    return Value(function=Function("lambda", node, walk.scope), node=node, label="lambda")


def named(walk: "Walk", node: ast.NamedExpr) -> Value:
    value = evaluate(walk, node.value)
    walk.assign(node.target, value, node)
    return value


def yielded(walk: "Walk", node: ast.Yield | ast.YieldFrom) -> Value:
    value = evaluate(walk, node.value)
    if walk.returned:
        made = Value(kind="yielded", sources=(value,), taints=value.taints, node=node)
        made.fields["*"] = value
        made.fields["within"] = Value(items=walk.withs[walk.frames[-1].num_withs :])
        walk.returned[-1].append((made, None))
    return Value(node=node)


def starred(walk: "Walk", node: ast.Starred) -> Value:
    return evaluate(walk, node.value)


def call(walk: "Walk", node: ast.Call) -> Value:
    """A call: noted, then followed into own functions, or given its known effect."""
    callee = evaluate(walk, node.func)
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    open_ended = False
    for one in node.args:
        value = evaluate(walk, one)
        if isinstance(one, ast.Starred):
            if value.items is not None:
                args += value.items
                continue
            open_ended = True
        args.append(value)
    nodes: dict[str, ast.AST] = {}
    for keyword in node.keywords:
        value = evaluate(walk, keyword.value)
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


def evaluate_quietly(walk: "Walk", node: ast.AST) -> Value | None:
    """The receiver of a method whose callee did not keep it: a plain look-up, noting nothing."""
    if isinstance(node, ast.Name):
        return walk.scope.find(node.id)
    if isinstance(node, ast.Attribute):
        base = evaluate_quietly(walk, node.value)
        return None if base is None else attribute_of(walk, base, node.attr, node)
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


def file_answer(made: Call) -> bool:
    """Whether a method asks the file system about a path: `Path(...).exists()`."""
    receiver = made.receiver
    if made.method not in FILE_METHODS or receiver is None:
        return False
    return receiver.kind == "path" or made.method in {"exists", "is_file", "is_dir"}


def file_value(made: Call) -> Value:
    return Value(taints=frozenset({FILES}), sources=(made.receiver,) if made.receiver else ())


HANDLERS: Mapping[type[ast.AST], Callable[["Walk", Any], Value]] = {
    ast.Constant: constant,
    ast.Name: name,
    ast.Attribute: attribute,
    ast.Subscript: subscript,
    ast.Slice: slice_,
    ast.Tuple: sequence,
    ast.List: sequence,
    ast.Set: sequence,
    ast.Dict: dictionary,
    ast.BoolOp: boolean,
    ast.UnaryOp: unary,
    ast.BinOp: binary_operation,
    ast.Compare: compare,
    ast.IfExp: conditional,
    ast.ListComp: comprehension,
    ast.SetComp: comprehension,
    ast.GeneratorExp: comprehension,
    ast.DictComp: comprehension,
    ast.Lambda: lambda_,
    ast.NamedExpr: named,
    ast.Yield: yielded,
    ast.YieldFrom: yielded,
    ast.Starred: starred,
    ast.Call: call,
}

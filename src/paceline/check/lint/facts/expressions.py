"""What an expression holds, and the walking into own functions that its calls ask for."""

import ast
import builtins
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.check.lint.facts import comparisons, follow, imports, iteration
from paceline.check.lint.facts.choices import either, one_of
from paceline.check.lint.facts.events import Call, Function, Guard, Loop, Scope
from paceline.check.lint.facts.names import (
    KNOWN_LIBRARIES,
    MAIN_NAMES,
    RANK_NAMES,
    canonical,
    kind_by_name,
)
from paceline.check.lint.facts.source import text
from paceline.check.lint.facts.unknowns import environment, parameter
from paceline.check.lint.facts.values import (
    DATA,
    RANK,
    UNKNOWN,
    UNSEEN,
    Value,
    all_taints,
    computed,
)
from paceline.check.lint.facts.walker import Walker

SHAPES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "grad_fn"})


def evaluate(walk: Walker, node: ast.AST | None) -> Value:
    """What an expression holds."""
    if node is None:
        return Value(const=None)
    kind = type(node)
    handler = HANDLERS.get(kind) or comparisons.HANDLERS.get(kind)
    value = handler(walk, node) if handler is not None else children(walk, node)
    if value.node is None:
        value.node = node
    return value


def children(walk: Walker, node: ast.AST) -> Value:
    """An expression of which only its parts matter."""
    parts = tuple(evaluate(walk, one) for one in ast.iter_child_nodes(node) if is_value(one))
    return Value(node=node, sources=parts, taints=all_taints(parts))


def is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.expr | ast.FormattedValue)


def constant(walk: Walker, node: ast.Constant) -> Value:
    return Value(const=node.value, node=node)


def name(walk: Walker, node: ast.Name) -> Value:
    found = walk.scope.find(node.id)
    if found is not None:
        return found if found.member is None else imports.member_of(walk, found)
    if node.id in BUILTINS:
        return Value(name=f"builtins.{node.id}", label=node.id)
    made = parameter(node.id, None)
    return walk.scope.module.names.setdefault(node.id, made)


BUILTINS = frozenset(dir(builtins))


def evaluate_quietly(walk: Walker, node: ast.AST) -> Value | None:
    """The receiver of a method whose callee did not keep it: a plain look-up, noting nothing."""
    if isinstance(node, ast.Name):
        return walk.scope.find(node.id)
    if isinstance(node, ast.Attribute):
        base = evaluate_quietly(walk, node.value)
        return None if base is None else attribute_of(walk, base, node.attr, node)
    return None


def attribute(walk: Walker, node: ast.Attribute) -> Value:
    return attribute_of(walk, evaluate(walk, node.value), node.attr, node)


def attribute_of(walk: Walker, base: Value, attr: str, node: ast.AST | None) -> Value:
    """`base.attr`: what was assigned, a method, a part of a module, or an unknown of its own."""
    if attr in base.fields:
        return base.fields[attr]
    if base.file is not None:
        found = imports.attribute_of_file(walk, base, attr)
        if found is not None:
            return found
    if base.name is not None:
        made = Value(name=canonical(f"{base.name}.{attr}"), label=f"{base.label}.{attr}", node=node)
        if attr in RANK_NAMES and "." not in base.name:  # `idr_torch.rank`: a package of one's own
            made.taints = frozenset({RANK})
        return made
    if base.options:
        held = [one for one in base.any() if one.const is not None] or list(base.any())
        made = one_of([attribute_of(walk, one, attr, node) for one in held], base.test)
        if made.options:
            made.receiver, made.attribute = base, attr
            if attr in STEP_COUNTERS:
                made.taints = all_taints(made.options)
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


STEP_COUNTERS = frozenset({"global_step", "global_steps", "global_samples", "micro_steps"})
"""Attributes in which engines and trainers count the steps that all ranks take together."""

ALIKE_KINDS = frozenset({"parser", "model", "optimizer", "loader", "accelerator", "fabric"})


def attribute_taints(base: Value, attr: str) -> frozenset[str]:
    if attr in SHAPES:
        return frozenset({"shape"}) if attr == "shape" and DATA in base.taints else frozenset()
    if attr in STEP_COUNTERS or base.kind in ALIKE_KINDS:
        return frozenset()
    if base.kind == "namespace" or is_unseen(base):
        return frozenset()
    return base.taints


def is_unseen(value: Value) -> bool:
    """Whether a call of code that is not seen gave an object, whose parts may be anything."""
    made = value.call
    return value.instance == UNSEEN or (
        isinstance(made, Call)
        and made.own is None
        and value.kind is None
        and made.name.split(".")[0] not in KNOWN_LIBRARIES | sys.stdlib_module_names
    )


def attribute_kind(base: Value, attr: str) -> str | None:
    if base.kind in {"batch", "output", "path", "namespace"}:
        return kind_by_name(attr) if base.kind == "namespace" else None
    return kind_by_name(attr)


def own_attribute(walk: Walker, base: Value, attr: str, node: ast.AST | None) -> Value | None:
    """A method, property or class attribute of an instance of an own class, or of the class."""
    own_class = base.of_class or base.own_class
    if own_class is None:
        return None
    method = own_class.method(attr)
    if method is not None:
        bound = base if base.of_class is not None else None
        if bound is not None and method.has_decorator("property", "cached_property"):
            return walk.enter(method, [bound], {}, None)
        if method.has_decorator("staticmethod"):
            bound = None
        return Value(function=method, receiver=bound, attribute=attr, label=f"{base.label}.{attr}")
    found: Value | None = own_class.attribute(attr)
    return found


def subscript(walk: Walker, node: ast.Subscript) -> Value:
    base, index = evaluate(walk, node.value), evaluate(walk, node.slice)
    items = base.items or []
    if isinstance(index.const, int) and -len(items) <= index.const < len(items):
        return items[index.const]
    if base.entries is not None and isinstance(index.const, str) and index.const in base.entries:
        return base.entries[index.const]
    if base.name == "os.environ" and isinstance(index.const, str):
        return environment(index.const, node)
    unseen = is_unseen(base) and isinstance(index.const, str)
    held = base.taints
    if base.entries is not None and isinstance(index.const, str):
        held = all_taints(base.sources)  # of `{"a": x, **rest}["b"]`: what `rest` holds
    taints = index.taints if unseen else held | index.taints
    if holds_groups(base):
        return Value(node=node, sources=(base,), taints=base.taints, receiver=base)
    if "shape" in base.taints:
        taints = frozenset() if index.const in {0, UNKNOWN} else frozenset({DATA})
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


def holds_groups(base: Value) -> bool:
    """Whether it is a list of process groups: a rank takes its own, and all make the same calls."""
    parts = [*(base.items or ()), *(one for one in (base.fields.get("*"),) if one is not None)]
    return any(one.instance == "torch.distributed.new_group" for one in parts)


def slice_(walk: Walker, node: ast.Slice) -> Value:
    parts = tuple(evaluate(walk, one) for one in (node.lower, node.upper, node.step) if one)
    return Value(node=node, sources=parts, taints=all_taints(parts))


def sequence(walk: Walker, node: ast.Tuple | ast.List | ast.Set) -> Value:
    if any(isinstance(one, ast.Starred) for one in node.elts):
        parts = [evaluate(walk, one) for one in node.elts]
        return Value(node=node, sources=tuple(parts), taints=all_taints(parts))
    items = [evaluate(walk, one) for one in node.elts]
    consts = [one.const for one in items]
    const = UNKNOWN
    if items and all(one is not UNKNOWN for one in consts) and isinstance(node, ast.Tuple):
        const = tuple(consts)
    return Value(node=node, items=items, taints=all_taints(items), const=const)


def dictionary(walk: Walker, node: ast.Dict) -> Value:
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


def binary_operation(walk: Walker, node: ast.BinOp) -> Value:
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
    consts = (left.const, right.const)
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in consts):
        made.const = computed(sign, *consts)
    return made


def conditional(walk: Walker, node: ast.IfExp) -> Value:
    test = evaluate(walk, node.test)
    if comparisons.is_settled(walk, node.test, test):
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
    walk: Walker, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
) -> Value:
    outer, walk.scope = walk.scope, Scope(outer=walk.scope)
    loops, mark = len(walk.loops), len(walk.guards)
    sources: list[Value] = []
    for generator in node.generators:
        over, element = iteration.elements(walk, evaluate(walk, generator.iter), node)
        walk.loops.append(Loop(node, over, (), len(walk.frames)))
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


def lambda_(walk: Walker, node: ast.Lambda) -> Value:
    return Value(function=Function("lambda", node, walk.scope), node=node, label="lambda")


def named(walk: Walker, node: ast.NamedExpr) -> Value:
    value = evaluate(walk, node.value)
    walk.assign(node.target, value, node)
    return value


def yielded(walk: Walker, node: ast.Yield | ast.YieldFrom) -> Value:
    value = evaluate(walk, node.value)
    if walk.returned:
        made = Value(kind="yielded", sources=(value,), taints=value.taints, node=node)
        made.fields["*"] = value
        made.fields["within"] = Value(items=walk.withs[walk.frames[-1].num_withs :])
        walk.returned[-1].append((made, None))
    return Value(node=node)


def starred(walk: Walker, node: ast.Starred) -> Value:
    return evaluate(walk, node.value)


HANDLERS: Mapping[type[ast.AST], Callable[[Walker, Any], Value]] = {
    ast.Call: follow.call,
    ast.Constant: constant,
    ast.Name: name,
    ast.Attribute: attribute,
    ast.Subscript: subscript,
    ast.Slice: slice_,
    ast.Tuple: sequence,
    ast.List: sequence,
    ast.Set: sequence,
    ast.Dict: dictionary,
    ast.BinOp: binary_operation,
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
}

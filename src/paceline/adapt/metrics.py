"""Numbers that are shown or counted: made of all ranks' samples, as they were of the whole batch.

A mean loss becomes the mean over ranks, a count or a sum of losses the sum over ranks. Both are
collectives, so they are put only where every rank comes by.
"""

import ast
from typing import Literal

from paceline.adapt.adaptation import Work

Kind = Literal["mean", "sum"]

_SAME = {"item", "detach", "cpu", "float", "double", "tolist", "numpy", "squeeze", "data", "int"}
_SUMS = {"sum", "size", "numel", "count_nonzero"}
_SHOWN_BY = {
    "print", "set_postfix", "set_description", "add_scalar", "log", "info", "write", "debug",
    "set_postfix_str", "log_metrics",
}  # fmt: skip


def reduce_numbers(work: Work) -> None:
    """Reduce what is shown of the training, where it can be read how it is meant."""
    for scan in (_assigned_means, _accumulated, _collected, _converted):
        scan(work)
        work.alike.forget()
    _shown_shares(work)


def _assigned_means(work: Work) -> None:
    """`value = loss.item()`."""
    for call in _conversions(work):
        stmt = work.script.statement(call)
        kept = (ast.Assign, ast.AnnAssign, ast.Return)
        if isinstance(stmt, kept) and kind(work, call) == "mean":
            whole = _largest(work, call)
            if kind(work, whole) == "mean":
                _reduce(work, whole, "mean")


def _accumulated(work: Work) -> None:
    """`total += loss.item() * len(x)`."""
    script = work.script
    for stmt in ast.walk(script.tree):
        if not isinstance(stmt, ast.AugAssign) or not isinstance(stmt.op, ast.Add):
            continue
        if stmt not in work.roles.training or not work.alike.varies(stmt.value):
            continue
        place = script.place(stmt.target)
        if place is None or place in _loss_places(work) or _read_as_tensor(work, stmt.target):
            continue
        if not any(isinstance(b.value, ast.Constant) for b in script.bindings.get(place, [])):
            continue
        which = kind(work, stmt.value)
        if which is not None:
            _reduce(work, stmt.value, which)
        else:
            work.leave(stmt, "counts this rank's samples only, and it cannot be read "
                             "whether a sum or a "
                             "mean over ranks is meant: use sum_over_ranks or "
                             "mean_over_ranks")  # fmt: skip


def _read_as_tensor(work: Work, target: ast.expr) -> bool:
    place = work.script.place(target)
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("item", "detach", "cpu", "tolist")
        and work.script.place(node.value) == place
        for node in ast.walk(work.script.tree)
    ) or any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "item"
        and isinstance(call.func.value, ast.BinOp)
        and any(work.script.place(n) == place for n in ast.walk(call.func.value))
        for call in work.script.calls
    )


def _converted(work: Work) -> None:
    """`.item()` wherever else: in a print, a list, a progress bar."""
    for call in _conversions(work):
        stmt = work.script.statement(call)
        whole = _largest(work, call)
        which = kind(work, whole)
        if which is None and call in work.roles.training:
            work.leave(
                call,
                "this rank's own number, and whether a sum or a mean over ranks is meant cannot be "
                "read: use sum_over_ranks or mean_over_ranks",
            )
        if which is None or (which == "sum" and isinstance(stmt, (ast.Assign, ast.AnnAssign))):
            continue
        if isinstance(stmt, ast.AugAssign) and stmt in work.roles.training:
            continue
        if isinstance(stmt, (ast.If, ast.While, ast.Return)) and which == "sum":
            continue
        _reduce(work, whole, which)


def _collected(work: Work) -> None:
    """`meter.update(accuracy, n)`, `values.append(accuracy)` of a number made before."""
    script = work.script
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("update", "append"):
            continue
        if call not in work.roles.training or not call.args:
            continue
        value = call.args[0]
        if not isinstance(value, (ast.Name, ast.Call)) or not work.alike.varies(value):
            continue
        if _is_number(work, value) and kind(work, value) == "mean":
            _reduce(work, value, "mean")


def _is_number(work: Work, node: ast.expr) -> bool:
    """Whether it was made by `.item()` or `float()`, here or in the function that returns it."""
    script = work.script
    place = script.place(node)
    made = [b.value for b in script.bindings.get(place, [])] if place is not None else [node]
    for value in made:
        called = script.called(value) if isinstance(value, ast.Call) else None
        if not any(word in ast.unparse(called or value) for word in (".item()", "float(")):
            return False
    return bool(made)


def _conversions(work: Work) -> list[ast.Call]:
    """`.item()` and `float()` of what differs between ranks, where all ranks come by."""
    script = work.script
    return [
        call
        for call in script.calls
        if (
            (isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args)
            or (script.dotted(call.func) == "float" and len(call.args) == 1)
        )
        and work.alike.varies(call)
        and not _under(work, call)
        and _follows_training(work, call)
    ]


def _under(work: Work, node: ast.expr) -> bool:
    """Whether it, or what holds it, is reduced already."""
    return node in work.alike.reduced or any(p in work.alike.reduced for p in work.script.up(node))


def _follows_training(work: Work, node: ast.AST) -> bool:
    """In a function that trains or calls one that does, not in a helper for metrics."""
    function = work.script.function(node)
    return function is None or work.script.reaches_backward(function)


def _largest(work: Work, node: ast.expr) -> ast.expr:
    """The product or quotient it is a factor of."""
    parent = work.script.parents[node]
    while isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Mult, ast.Div)):
        if kind(work, parent) is None:
            break
        node, parent = parent, work.script.parents[parent]
    return node


def _reduce(work: Work, node: ast.expr, which: Kind) -> None:
    script = work.script
    if _under(work, node) or any(inner in work.alike.reduced for inner in ast.walk(node)):
        return
    for guard in work.guards(node):
        if work.alike.varies(guard.test):
            work.leave(node, "shown under a condition that ranks decide by their own "
                             "samples, so it "
                             "stays this rank's own number: a collective here would "
                             "hang")  # fmt: skip
            return
    work.alike.reduced.add(node)
    name = work.use(f"{which}_over_ranks")
    parent = script.parents[node]
    if isinstance(parent, ast.BinOp) and isinstance(node, ast.BinOp):
        work.edits.wrap(node, f"{name}(", ")")
    else:
        work.edits.wrap(node, f"{name}(", ")")
    work.say(node, f"{ast.unparse(node)}: the {which} over all ranks, not this rank's share")


def _loss_places(work: Work) -> set[tuple[str, str]]:
    """The names that a backward pass starts from, and what they are made of by arithmetic."""
    script = work.script
    found: set[tuple[str, str]] = set()
    todo: list[ast.AST] = [
        call.func.value for call in script.backwards if isinstance(call.func, ast.Attribute)
    ]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.BinOp):
            todo += [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            todo += [*node.args] if node.func.attr == "scale" else [node.func.value]
        place = script.place(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
        if place is not None and place not in found:
            found.add(place)
            todo.extend(
                each.value for each in script.bindings.get(place, [])
                if isinstance(each.value, (ast.BinOp, ast.Name))
            )  # fmt: skip
    return found


def kind(work: Work, node: ast.expr, depth: int = 0) -> Kind | None:
    """Whether a number that differs between ranks is a mean over samples or a sum over them."""
    script = work.script
    if depth > 12:
        return None
    if isinstance(node, ast.BinOp):
        return _kind_of_arithmetic(work, node, depth + 1)
    if isinstance(node, ast.Call):
        return _kind_of_call(work, node, depth + 1)
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return "sum"
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            return kind(work, node.value, depth + 1)
        return None
    if isinstance(node, ast.Attribute) and node.attr == "loss":
        return "mean"
    if isinstance(node, ast.IfExp):
        return kind(work, node.body, depth + 1)
    place = script.place(node)
    if place is None:
        return None
    if place in _loss_places(work):
        from paceline.adapt.loop import sums

        return "sum" if sums(work, node) else "mean"
    kinds = {
        kind(work, each.value, depth + 1)
        for each in script.bindings.get(place, [])
        if not isinstance(each.value, ast.Constant) and each.index is None
    }
    kinds |= {
        kind(work, stmt.value, depth + 1)
        for stmt in ast.walk(script.tree)
        if isinstance(stmt, ast.AugAssign) and script.place(stmt.target) == place
    }
    return kinds.pop() if len(kinds) == 1 else None


def _kind_of_arithmetic(work: Work, node: ast.BinOp, depth: int) -> Kind | None:
    left = kind(work, node.left, depth) if work.alike.varies(node.left) else None
    right = kind(work, node.right, depth) if work.alike.varies(node.right) else None
    unknown = (left is None and work.alike.varies(node.left)) or (
        right is None and work.alike.varies(node.right)
    )
    if unknown:
        return None
    if isinstance(node.op, ast.Mult):
        if left == "mean" and right == "mean":
            return None
        return "sum" if "sum" in (left, right) else (left or right)
    if isinstance(node.op, ast.Div):
        if not work.alike.varies(node.right):
            return left
        return "mean" if left == "sum" and right == "sum" else None
    if isinstance(node.op, (ast.Add, ast.Sub)):
        if left is None or right is None:
            return left or right
        return left if left == right else None
    return None


def _kind_of_call(work: Work, node: ast.Call, depth: int) -> Kind | None:
    script = work.script
    func = node.func
    full = script.qualified(func) or ""
    name = full.rsplit(".", 1)[-1] or (script.dotted(func) or "")
    if name in ("float", "int", "round", "abs") and node.args:
        return kind(work, node.args[0], depth)
    if name == "len" or full == "torch.sum":
        return "sum"
    if full == "torch.mean":
        return "mean"
    if full.startswith("torch.nn.functional.") and name.endswith(("loss", "cross_entropy")):
        return "sum" if any("sum" in ast.unparse(k.value) for k in node.keywords) else "mean"
    called = script.called(node)
    if called is not None:
        kinds = {
            kind(work, each.value, depth)
            for each in ast.walk(called)
            if isinstance(each, ast.Return) and each.value is not None
        }
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(func, ast.Attribute) and not full:
        if func.attr in _SUMS:
            return "sum"
        if func.attr == "mean":
            return "mean"
        if func.attr in _SAME:
            return kind(work, func.value, depth)
    return None


def _shown_shares(work: Work) -> None:
    """Numbers of this rank alone that are still shown: they are listed, once a line."""
    script = work.script
    for call in script.calls:
        name = (script.dotted(call.func) or "").rsplit(".", 1)[-1]
        if isinstance(call.func, ast.Attribute):
            name = call.func.attr
        if name not in _SHOWN_BY or not _follows_training(work, call):
            continue
        given = [*call.args, *(k.value for k in call.keywords)]
        if any(work.alike.varies(each) for each in given):
            work.leave(call, "shows rank 0's share: its own samples, not all ranks'")

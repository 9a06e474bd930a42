"""The `set_epoch` call that a loop over epochs lacks, and whether it can be written there.

Nothing is offered where the sampler may be another object, None, or out of sight, and where the
loop counts no epochs.
"""

import ast
from collections.abc import Iterator

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COUNTERS = ("range", "trange", "tqdm.trange", "tqdm.auto.trange")
_PROGRESS = ("tqdm", "tqdm.tqdm", "track")
"""Bars around a loop, which hand on what they go over."""


def set_epoch_call(tree: ast.Module, line: int) -> str | None:
    """`sampler.set_epoch(epoch)` for the loop of this line, as it would be typed."""
    loop = next(
        (one for one in ast.walk(tree) if isinstance(one, ast.For) and one.lineno == line), None
    )
    counter = _counter(loop) if loop is not None else None
    if loop is None or counter is None:
        return None
    scopes = _scopes_around(tree, loop)
    sampler = _visible_sampler(tree, scopes, loop)
    return f"{sampler}.set_epoch({counter})" if sampler is not None else None


def _counter(loop: ast.For) -> str | None:
    """The name that counts this loop's turns from a `range` or an `enumerate`."""
    over = loop.iter
    while isinstance(over, ast.Call) and ast.unparse(over.func) in _PROGRESS and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Call):
        return None
    name, target = ast.unparse(over.func), loop.target
    if name == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif name not in _COUNTERS:
        return None
    return target.id if isinstance(target, ast.Name) and target.id != "_" else None


def _scopes_around(tree: ast.Module, loop: ast.For) -> list[_Scope]:
    """The functions that hold the loop, the inner ones first, and the module."""
    around = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(each is loop for each in ast.walk(one))
    ]
    return [*sorted(around, key=lambda one: -one.lineno), tree]


def _visible_sampler(tree: ast.Module, scopes: list[_Scope], loop: ast.For) -> str | None:
    samplers = {name for name in _names_bound(tree) if _is_sampler(_value(scopes, name, loop))}
    own = _own_sampler(tree, loop)
    if own is not None:
        samplers.add(own)
    if len(samplers) == 1:
        return samplers.pop()
    if samplers:
        return None
    used = {
        one.id
        for each in loop.body
        for one in ast.walk(each)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }
    loaders = {name for name in used if _gives_loader(tree, _value(scopes, name, loop))}
    return f"{loaders.pop()}.sampler" if len(loaders) == 1 else None


def _value(scopes: list[_Scope], name: str, before: ast.stmt) -> ast.expr | None:
    """What a name surely holds where a statement starts; None when that is not plain."""
    for scope in scopes:
        bound = [one for one in _stores(scope) if one[0] == name]
        if not bound:
            continue
        value = bound[0][1]
        if len(bound) > 1 or value is None:
            return None
        block = next(one for one in _blocks(scope) if any(_assigns(each, value) for each in one))
        number = next(n for n, each in enumerate(block) if _assigns(each, value))
        if scope is not scopes[0]:  # an outer scope's: read when the function runs
            return value if block is scope.body else None
        follows = any(each is before for one in block[number + 1 :] for each in ast.walk(one))
        return value if follows else None
    return None


def _assigns(statement: ast.stmt, value: ast.expr) -> bool:
    return isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is value


def _stores(scope: _Scope) -> Iterator[tuple[str, ast.expr | None]]:
    """Every name that a scope binds, with the value where one plain assignment gives it."""
    if not isinstance(scope, ast.Module):
        arguments = scope.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield one.arg, None
    plain: dict[int, ast.expr | None] = {}
    for node in _inside(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            plain[id(node.targets[0])] = node.value
        elif isinstance(node, ast.AnnAssign):
            plain[id(node.target)] = node.value
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from ((name, None) for name in node.names)
    for node in _inside(scope):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, plain.get(id(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, None
    if isinstance(scope, ast.Module):
        for node in ast.walk(scope):
            if isinstance(node, ast.Global):
                yield from ((name, None) for name in node.names)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _inside(node)


def _blocks(scope: _Scope) -> Iterator[list[ast.stmt]]:
    for node in (scope, *_inside(scope)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and (node is scope or not isinstance(node, _FUNCTIONS)):
                yield block


def _names_bound(tree: ast.Module) -> set[str]:
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_sampler(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and not _for_evaluation(target.id)
    }


def _for_evaluation(text: str) -> bool:
    return any(word in text.lower() for word in ("val", "test", "eval"))


def _is_sampler(value: ast.expr | None) -> bool:
    """A call of DistributedSampler that shuffles and is not for evaluation."""
    if not isinstance(value, ast.Call):
        return False
    if not ast.unparse(value.func).endswith("DistributedSampler"):
        return False
    if any(_for_evaluation(ast.unparse(one)) for one in value.args):
        return False
    return not any(
        one.arg == "shuffle" and isinstance(one.value, ast.Constant) and one.value.value is False
        for one in value.keywords
    )


def _own_sampler(tree: ast.Module, loop: ast.For) -> str | None:
    """`self.sampler` of the class whose method holds the loop, given once and on every path."""
    for owner in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)):
        if not any(one is loop for one in ast.walk(owner)):
            continue
        stores = [
            one
            for one in ast.walk(owner)
            if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
        ]
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
                continue
            for each in method.body:
                if not isinstance(each, ast.Assign) or not _is_sampler(each.value):
                    continue
                name = ast.unparse(each.targets[0])
                if [ast.unparse(one) for one in stores].count(name) == 1 and (
                    isinstance(each.targets[0], ast.Attribute) and not _for_evaluation(name)
                ):
                    return name
    return None


def _gives_loader(tree: ast.Module, value: ast.expr | None) -> bool:
    """The file's one DataLoader with a DistributedSampler, or a function that returns just it."""
    loaders = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("DataLoader")
    ]
    if len(loaders) != 1 or not isinstance(value, ast.Call):
        return False
    scopes, statement = _scopes_of(tree, loaders[0])
    given = next((one.value for one in loaders[0].keywords if one.arg == "sampler"), None)
    if statement is None or not (
        _is_sampler(given)
        or (isinstance(given, ast.Name) and _is_sampler(_value(scopes, given.id, statement)))
    ):
        return False
    if value is loaders[0]:
        return True
    function = scopes[0]
    if isinstance(function, ast.Module) or ast.unparse(value.func) != function.name:
        return False
    returns = [one for one in _inside(function) if isinstance(one, ast.Return)]
    if len(returns) != 1 or returns[0] is not function.body[-1]:
        return False
    back = returns[0].value
    if isinstance(back, ast.Name):
        back = _value(scopes, back.id, returns[0])
    return back is loaders[0]


def _scopes_of(tree: ast.Module, call: ast.Call) -> tuple[list[_Scope], ast.stmt | None]:
    """The functions around a call, the inner ones first, and the innermost statement with it."""
    around = [one for one in ast.walk(tree) if any(each is call for each in ast.walk(one))]
    functions = [one for one in around if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    statements = [one for one in around if isinstance(one, ast.stmt)]
    scopes: list[_Scope] = [*sorted(functions, key=lambda one: -one.lineno), tree]
    return scopes, statements[-1] if statements else None

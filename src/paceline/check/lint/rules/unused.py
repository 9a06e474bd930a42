"""Parameters that get no gradient: DDP waits for them, or looks for them in vain."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Class
from paceline.check.lint.program import Program
from paceline.check.lint.rules.ddp import wrapped_models
from paceline.check.lint.values import Value, innermost
from paceline.check.lint.words import words_of

PARAMETERLESS = words_of("python", "parameterless")
"""Modules of torch.nn without parameters: DDP does not wait for their gradients."""


def check_unused_parameters(program: Program, context: Context) -> Iterator[Finding]:
    """A module made in `__init__` that `forward` never uses: DDP waits for its gradient."""
    reported: set[ast.AST] = set()
    for call, model in wrapped_models(program):
        if model.of_class is None or tolerates_unused(call):
            continue
        for own, module in own_modules(model):
            called = {"forward", *methods_called(program, own)}
            for name, assign in unused_modules(
                own, module, flags_never_set(program, own), frozenset(called)
            ):
                if assign in reported or used_outside(program, name):
                    continue
                reported.add(assign)
                yield program.finding(
                    "ddp-unused-parameters",
                    assign,
                    what=(
                        f"{own.name}.{name} has parameters and forward never uses it: DDP waits "
                        "for their gradients and raises in the second iteration"
                    ),
                    fix=(
                        f"remove {name}, freeze it with requires_grad_(False) before wrapping, or "
                        "pass find_unused_parameters=True to DDP"
                    ),
                    seen=(call,),
                    level=how_sure(own, module.fields[name], assign),
                )


def how_sure(own: Class, held: Value, assign: ast.AST) -> Severity:
    """An error where the class stands alone and the line itself makes a layer of torch's."""
    made = held.call.node if isinstance(held.call, Call) else None
    is_layer = (held.instance or "").startswith("torch.nn.") and made is not None
    alone = len(list(own.ancestors())) == 1
    is_shown = is_layer and alone and made is getattr(assign, "value", None)
    return Severity.ERROR if is_shown else Severity.INFO


def tolerates_unused(call: Call) -> bool:
    """Whether DDP was told to look for unused parameters, or may have been."""
    if call.open_ended:
        return True
    given = [call.argument(6, "find_unused_parameters"), call.argument(None, "static_graph")]
    return any(one is not None and one.const is not False for one in given)


def own_modules(model: Value) -> Iterator[tuple[Class, Value]]:
    """The model and the modules of own classes inside it, each with its class."""
    seen: set[int] = set()
    queue = [model]
    while queue:
        one = queue.pop()
        if id(one) in seen or len(seen) > 200:
            continue
        seen.add(id(one))
        if one.of_class is not None and one.kind == "model":
            yield one.of_class, one
        for held in one.fields.values():
            if held.kind != "model":
                continue
            parts = held.origins() if held.of_class is None else iter((held,))
            queue += [part for part in parts if part.kind == "model"]


def flags_never_set(program: Program, own: Class) -> set[str]:
    """Parameters of forward that are False unless passed, and that no call passes."""
    forward = own.method("forward")
    if forward is None:
        return set()
    names = [one.arg for one in forward.node.args.args]
    defaults = dict(zip(names[::-1], forward.node.args.defaults[::-1], strict=False))
    flags = {
        name
        for name, default in defaults.items()
        if isinstance(default, ast.Constant) and default.value is False
    }
    for call in program.forwards:
        model = innermost(next((call.forward_of or Value()).any()))
        if model.of_class is not own:
            continue
        if call.open_ended:
            return set()
        flags -= {*call.kwargs, *names[1 : len(call.args) + 1]}
    return flags


def methods_called(program: Program, own: Class) -> Iterator[str]:
    """Methods of a class that code outside of it calls: `model.module.loss(batch)`."""
    names = {name for part in own.ancestors() for name in part.methods} - {"__init__"}
    for node in program.nodes():
        if isinstance(node, ast.Attribute) and node.attr in names and self_attribute(node) is None:
            yield node.attr


def unused_modules(
    own: Class,
    module: Value,
    never_set: set[str],
    starts: frozenset[str] = frozenset({"forward"}),
) -> Iterator[tuple[str, ast.AST]]:
    """Modules with parameters that nothing reached from `forward` reads, and where made.

    Args:
        own: The class.
        module: The object of it.
        never_set: Parameters of forward that stay False.
        starts: Methods that the program calls.
    """
    forward = own.method("forward")
    if forward is None or any(reads_by_name(one) for one in own.ancestors()):
        return
    library = [one for one in own.library_bases() if one != "torch.nn.Module"]
    if library:
        return
    read = {name for one in starts for name in attributes_reached(own, one, never_set)}
    for part in own.ancestors():
        init = part.methods.get("__init__")
        if init is None:
            continue
        for node in ast.walk(init.node):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = self_attribute(target)
                held = module.fields.get(name) if name is not None else None
                if name is None or name in read or held is None or not has_parameters(held):
                    continue
                if not used_in_init(init.node, name, node):
                    yield name, node


def self_attribute(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else None
    return None


def used_in_init(init: ast.AST, name: str, assigned: ast.AST) -> bool:
    """Whether `__init__` goes on to use it: ties its weight, freezes it, puts it into a list."""
    return any(
        self_attribute(node) == name and isinstance(getattr(node, "ctx", None), ast.Load)
        for node in ast.walk(init)
    )


def reads_by_name(own: Class) -> bool:
    """Whether some method reaches modules by names or lists that reading cannot follow."""
    for name, method in own.methods.items():
        if name == "__init__":
            continue
        for node in ast.walk(method.node):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {"getattr", "self.children", "self.modules", "self.named_children"}:
                    return True
            if isinstance(node, ast.Attribute) and node.attr in {"_modules", "__dict__"}:
                return True
    return False


def reached_nodes(node: ast.AST, never_set: set[str]) -> Iterator[ast.AST]:
    """The nodes of a method, without what `if flag:` guards where the flag is never set."""
    queue = [node]
    while queue:
        one = queue.pop()
        yield one
        dead = (
            isinstance(one, ast.If) and isinstance(one.test, ast.Name) and one.test.id in never_set
        )
        queue += one.orelse if dead and isinstance(one, ast.If) else ast.iter_child_nodes(one)


def attributes_reached(own: Class, start: str, never_set: set[str]) -> set[str]:
    """Attributes of self that a method reads, itself or through other methods of the class."""
    found: set[str] = set()
    queue = [start]
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        method = own.method(name)
        if name in seen or method is None:
            continue
        seen.add(name)
        for node in reached_nodes(method.node, never_set if name == start else set()):
            attribute = self_attribute(node)
            if is_super(node):
                found |= {one for part in own.ancestors() for one in attributes_of(part, name)}
            if attribute is not None:
                found.add(attribute)
                queue.append(attribute)
    return found


def is_super(node: ast.AST) -> bool:
    """`super()`, by which a method of the class below reaches one of those above."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def attributes_of(part: Class, name: str) -> Iterator[str]:
    """Attributes of self that a class's own method of a name speaks of."""
    method = part.methods.get(name)
    for node in ast.walk(method.node) if method is not None else ():
        if (attribute := self_attribute(node)) is not None:
            yield attribute


def has_parameters(held: Value) -> bool:
    """Whether a field holds a module with parameters."""
    for one in held.any():
        name = one.instance or ""
        if name == "torch.nn.Parameter":
            return True
        if one.of_class is not None and one.kind == "model":
            return any(has_parameters(field) for field in one.fields.values())
        last = name.rpartition(".")[2]
        if name in {"torch.nn.Sequential", "torch.nn.ModuleList"} and one.call is not None:
            parts = [part for arg in one.call.args for part in (arg.items or [arg])]
            if any("*" in part.fields for part in parts):
                return True
            return any(has_parameters(part) for part in parts)
        if one.kind == "model" and name.startswith("torch.nn."):
            return last not in PARAMETERLESS and not last.endswith(("Loss", "Pool2d", "Pool1d"))
        if one.kind == "model" and name:
            return True
    return False


def used_outside(program: Program, name: str) -> bool:
    """Whether code outside the classes' own `__init__` reads an attribute of that name."""
    for node in program.nodes():
        if isinstance(node, ast.Attribute) and node.attr == name and self_attribute(node) is None:
            return True
    return False


RULES = (check_unused_parameters,)

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
                    Severity.ERROR,
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
                )


def check_unused_outputs(program: Program, context: Context) -> Iterator[Finding]:
    """`logits, _ = model(x)`: what only the dropped output needs gets no gradient."""
    wraps = {id(call.result): call for call, _ in wrapped_models(program)}
    reported: set[int] = set()
    for forward in program.forwards:
        model, result = forward.forward_of, forward.result
        returned = result.fields.get("returned")
        if model is None or id(model) not in wraps or returned is None or not returned.items:
            continue
        if tolerates_unused(wraps[id(model)]):
            continue
        used = outputs_in_losses(program, result)
        if not used or used >= set(range(len(returned.items))):
            continue
        needed = {id(one) for k in used for one in modules_behind(returned.items[k])}
        for k, part in enumerate(returned.items):
            for module in modules_behind(part) if k not in used else ():
                if id(module) in needed or id(module) in reported or not has_parameters(module):
                    continue
                assign = next((one for one in program.assigns if one.value is module), None)
                if assign is None or assign.attribute is None:
                    continue
                reported.add(id(module))
                yield program.finding(
                    "ddp-unused-parameters",
                    Severity.ERROR,
                    assign,
                    what=(
                        f"only output {k} of forward needs {assign.attribute}, and line "
                        f"{forward.line} leaves it out of the loss: DDP waits for its gradient"
                    ),
                    fix="add that output to the loss, or do not compute it",
                    seen=(forward, wraps[id(model)]),
                )


def modules_behind(part: Value) -> list[Value]:
    """Modules whose forward passes an output is computed from."""
    return [
        one.call.forward_of
        for one in part.origins()
        if isinstance(one.call, Call) and one.call.forward_of is not None
    ]


def outputs_in_losses(program: Program, result: Value) -> set[int]:
    """Which parts of a tuple that forward returns reach a backward pass; all when it is unclear."""
    parts = {id(part): int(key[1:-1]) for key, part in result.fields.items() if key[1:-1].isdigit()}
    everything = set(range(len(result.fields["returned"].items or ())))
    used: set[int] = set()
    for backward in program.backwards:
        queue = [one for one in (backward.receiver, *backward.args) if one is not None]
        seen: set[int] = set()
        while queue:
            one = queue.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            index = (
                one.sources[1].const if one.receiver is result and len(one.sources) > 1 else None
            )
            if id(one) in parts:
                used.add(parts[id(one)])
            elif isinstance(index, int):
                used.add(index % len(everything))
            elif one is result:
                return everything
            else:
                queue += [*one.sources, *one.options, *(one.items or ())]
                queue += [*(one.entries or {}).values()]
                queue += [other for other in (one.receiver, one.element_of) if other is not None]
    return used


RANDOM = frozenset(
    {"random.random", "torch.rand", "numpy.random.rand", "numpy.random.random", "random.randint"}
)


def check_random_modules(program: Program, context: Context) -> Iterator[Finding]:
    """A module that forward skips at random has no gradient in that step."""
    wraps = [call for call, _ in wrapped_models(program) if not tolerates_unused(call)]
    if not wraps:
        return
    reported: set[int] = set()
    for call in program.forwards:
        if call.forward_of is None or call.forward_of.wrapper is not None or len(call.frames) < 2:
            continue
        if call.function is None or call.function.name != "forward":
            continue
        for guard in call.guards:
            drawn = any(
                isinstance(one.call, Call) and one.call.name in RANDOM
                for one in guard.test.origins()
            )
            if not drawn or id(guard.node) in reported or guard.depth != len(call.frames):
                continue
            reported.add(id(guard.node))
            yield program.finding(
                "ddp-unused-parameters",
                Severity.ERROR,
                guard,
                what=(
                    f"the module in line {call.line} is skipped at random: in that step DDP waits "
                    "for gradients that never come"
                ),
                fix="pass find_unused_parameters=True to DDP, or multiply the output by 0 instead",
                seen=(call, wraps[0]),
            )


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
            if attribute is not None:
                found.add(attribute)
                queue.append(attribute)
    return found


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


def check_find_unused(program: Program, context: Context) -> Iterator[Finding]:
    """`find_unused_parameters=True` for a model that uses all of them walks its graph in vain."""
    for call, model in wrapped_models(program):
        given = call.argument(6, "find_unused_parameters")
        if given is None or given.const is not True:
            continue
        simple = model.of_class is not None and uses_everything(model)
        yield program.finding(
            "ddp-find-unused-overhead",
            Severity.WARNING if simple else Severity.INFO,
            call.keyword_nodes.get("find_unused_parameters", call.node),
            what=(
                "DDP walks the whole graph after each forward pass to look for unused parameters"
                + (", and this model uses all of its parameters" if simple else "")
            ),
            fix="leave out find_unused_parameters=True",
        )


def uses_everything(model: Value) -> bool:
    """Whether forward is a straight line through all modules: no branch that may skip one."""
    for own, module in own_modules(model):
        forward = own.method("forward")
        if forward is None or any(True for _ in unused_modules(own, module, set())):
            return False
        for node in ast.walk(forward.node):
            if isinstance(node, ast.If | ast.IfExp | ast.Try | ast.Match | ast.While):
                return False
            if isinstance(node, ast.Subscript) and self_attribute(node.value) is not None:
                return False  # one head of several: `self.heads[task](x)`
    return True


RULES = (
    check_unused_parameters,
    check_unused_outputs,
    check_random_modules,
    check_find_unused,
)

"""What a script's names and values are: where each is kept, and what can have made it.

Read from the syntax tree alone, through imports, assignments, and the script's own functions and
classes. Nothing here changes anything; where two readings are possible, both are given. Leaves out
what trains (`roles.py`).
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, str]
"""Where a value is kept: the function or class that owns the name, and the name."""

_SAME_MODEL = {
    "to", "cuda", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_",
    "apply",
}  # fmt: skip
"""Methods of `nn.Module` that return the module itself."""

_WRAPPERS = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.compile"}
_PASS_THROUGH = {"enumerate", "iter", "tqdm", "list", "reversed", "trange"}
"""Calls whose result yields what their first argument yields."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A value given to a place: an expression, or one element of what it unpacks to."""

    value: ast.expr
    index: int | None
    stmt: ast.AST


def bound_by(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> what the imports among the nodes bind to it, in full."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


class Script:
    """The facts of one script; everything is looked up lazily and kept."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    # --- names ---------------------------------------------------------------------------------

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> what it was imported as, in full, wherever in the script."""
        return bound_by(ast.walk(self.tree))

    def qualified(self, node: ast.AST) -> str | None:
        """`torch.optim.AdamW` for whatever the script calls it; None where it is no import."""
        dotted = self.dotted(node)
        if dotted is None:
            return None
        head, _, rest = dotted.partition(".")
        if head in self.imports:
            return self.imports[head] + (f".{rest}" if rest else "")
        return None

    @staticmethod
    def dotted(node: ast.AST) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([node.id, *reversed(parts)])

    def up(self, node: ast.AST) -> Iterator[ast.AST]:
        """Everything that holds it, from near to far."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        if isinstance(node, ast.stmt):
            return node
        return next(each for each in self.up(node) if isinstance(each, ast.stmt))

    def function(self, node: ast.AST) -> Function | None:
        """The function it stands in; None at the top of the module."""
        for each in self.up(node):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return each
        return None

    def owner_class(self, function: ast.AST) -> ast.ClassDef | None:
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def scope_name(self, function: Function | None) -> str:
        return "" if function is None else f"{function.name}@{function.lineno}"

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The script's functions that are no methods."""
        return {
            node.name: node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and not isinstance(self.parents[node], ast.ClassDef)
        }

    @cached_property
    def every_function(self) -> list[Function]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)}

    def method(self, owner: ast.ClassDef, name: str) -> Function | None:
        for each in owner.body:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name == name:
                return each
        return None

    def is_module_class(self, name: str) -> bool:
        """Whether a class of the script is an `nn.Module`, also through one of its own."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            each = todo.pop()
            if each in seen or each not in self.classes:
                continue
            seen.add(each)
            for base in self.classes[each].bases:
                full = self.qualified(base) or ""
                if full in ("torch.nn.Module", "torch.nn.modules.Module") or (
                    full.startswith(("torch.nn.", "transformers."))
                ):
                    return True
                todo.append(self.dotted(base) or "")
        return False

    def place(self, node: ast.AST) -> Place | None:
        """Where a name or `self.x` is kept."""
        if isinstance(node, ast.Name):
            function = self.function(node)
            while function is not None and node.id not in self._locals(function):
                function = self.function(function)
            return self.scope_name(function) + self._evaluation(node), node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            function = self.function(node)
            owner = self.owner_class(function) if function else None
            first = function.args.args[0].arg if function and function.args.args else None
            if owner is not None and node.value.id == first:
                return f"class {owner.name}", node.attr
            return f"of {self.place(node.value)}", node.attr
        return None

    def _evaluation(self, node: ast.Name) -> str:
        """Marks a name that an evaluation loop gives values of its own: there it is another."""
        for parent in self.up(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return ""
            if parent in self.evaluations:
                return f" in {parent.lineno}" if node.id in self.evaluations[parent] else ""
        return ""

    @cached_property
    def evaluations(self) -> dict[ast.For, set[str]]:
        """Loops without gradients beside the training, with the names they give values to."""
        found: dict[ast.For, set[str]] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.For) or self.reaches_backward(node):
                continue
            text = ast.unparse(node)
            before = self._statements_before(node)
            if "no_grad" in text or "inference_mode" in text or before:
                bound = {
                    name.id
                    for part in [node.target, *node.body]
                    for name in ast.walk(part)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                }
                added = {
                    each.target.id
                    for each in ast.walk(node)
                    if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)
                }
                found[node] = bound - added
        return found

    def _statements_before(self, node: ast.For) -> bool:
        """Whether `.eval()` or a `with torch.no_grad()` comes before it, after any `.train()`."""
        child: ast.AST = node
        for parent in self.up(node):
            if isinstance(parent, ast.With) and any(
                word in ast.unparse(item)
                for item in parent.items
                for word in ("no_grad", "inference_mode")
            ):
                return True
            for name in ("body", "orelse"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and child in block:
                    for stmt in reversed(block[: block.index(child)]):
                        text = ast.unparse(stmt) if isinstance(stmt, ast.Expr) else ""
                        if text.endswith(".eval()"):
                            return True
                        if text.endswith((".train()", ".train(True)")):
                            return False
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return False
            child = parent
        return False

    def _locals(self, function: Function) -> set[str]:
        found = self._locals_of.get(function)
        if found is None:
            arguments = function.args
            found = {
                each.arg
                for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            }
            elsewhere: set[str] = set()
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    if self.function(node) is function:
                        found.add(node.id)
                elif isinstance(node, (ast.Global, ast.Nonlocal)):
                    elsewhere.update(node.names)
            found -= elsewhere
            self._locals_of[function] = found
        return found

    @cached_property
    def _locals_of(self) -> dict[Function, set[str]]:
        return {}

    @cached_property
    def bindings(self) -> dict[Place, list[Bound]]:
        """Place -> every value the script gives to it: assignments, arguments, loops, `with`."""
        bound: dict[Place, list[Bound]] = defaultdict(list)

        def bind(target: ast.expr, value: ast.expr, stmt: ast.AST, index: int | None) -> None:
            if isinstance(target, (ast.Tuple, ast.List)):
                elements = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
                for number, each in enumerate(target.elts):
                    if elements is not None and number < len(elements):
                        bind(each, elements[number], stmt, None)
                    else:
                        bind(each, value, stmt, number)
                return
            place = self.place(target)
            if place is not None:
                bound[place].append(Bound(value, index, stmt))

        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    bind(target, node.value, node, None)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                bind(node.target, node.value, node, None)
            elif isinstance(node, ast.NamedExpr):
                bind(node.target, node.value, self.statement(node), None)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if item.optional_vars is not None:
                        bind(item.optional_vars, item.context_expr, node, None)
            elif isinstance(node, ast.Call):
                called = self.called(node)
                if called is not None:
                    for name, value in self.arguments(node, called).items():
                        bound[(self.scope_name(called), name)].append(Bound(value, None, node))
        return bound

    def called(self, call: ast.Call) -> Function | None:
        """The script's own function that a call enters; `__init__` for a class."""
        func = call.func
        if isinstance(func, ast.Name):
            if func.id in self.functions and func.id not in self.imports:
                return self.functions[func.id]
            if func.id in self.classes:
                return self.method(self.classes[func.id], "__init__")
            return None
        if isinstance(func, ast.Attribute):
            owner = self._class_of(func.value)
            return self.method(owner, func.attr) if owner is not None else None
        return None

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """The script's class that a name is an instance of: `self`, or assigned from its call."""
        function = self.function(node)
        if isinstance(node, ast.Name) and function is not None:
            owner = self.owner_class(function)
            if owner is not None and function.args.args and function.args.args[0].arg == node.id:
                return owner
        name = self.dotted(node)
        if name is None:
            return None
        return self._instances.get(name.split(".")[-1])

    @cached_property
    def _instances(self) -> dict[str, ast.ClassDef]:
        """Names assigned from a call of one of the script's classes."""
        found: dict[str, ast.ClassDef] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            called = self.dotted(node.value.func)
            if called in self.classes and not self.is_module_class(called):
                for target in node.targets:
                    name = self.dotted(target)
                    if name is not None:
                        found[name.split(".")[-1]] = self.classes[called]
        return found

    def arguments(self, call: ast.Call, function: Function) -> dict[str, ast.expr]:
        """Parameter -> what the call gives for it; defaults and stars are left out."""
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
        if self.owner_class(function) is not None:
            names = names[1:]
        given: dict[str, ast.expr] = {}
        for name, value in zip(names, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            given[name] = value
        for keyword in call.keywords:
            if keyword.arg is not None:
                given[keyword.arg] = keyword.value
        return given

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Where the script calls a function of its own."""
        return [call for call in self.calls if self.called(call) is function]

    # --- where values come from ---------------------------------------------------------------

    def origins(self, node: ast.expr, index: int | None = None) -> frozenset[ast.expr]:
        """The calls and literals a value can have been made by, through everything in between."""
        return frozenset(self._origins(node, index, set()))

    def _origins(
        self, node: ast.expr, index: int | None, seen: set[tuple[ast.AST, int | None]]
    ) -> set[ast.expr]:
        if (node, index) in seen:
            return set()
        seen.add((node, index))
        if isinstance(node, ast.Attribute) and node.attr in ("module", "_orig_mod"):
            return self._origins(node.value, index, seen)
        place = self.place(node)
        if place is not None:
            found: set[ast.expr] = set()
            for bound in self.bindings.get(place, []):
                found |= self._origins(bound.value, bound.index, seen)
            return found
        if isinstance(node, ast.IfExp):
            return self._origins(node.body, index, seen) | self._origins(node.orelse, index, seen)
        if isinstance(node, (ast.Tuple, ast.List)) and index is not None:
            if index < len(node.elts):
                return self._origins(node.elts[index], None, seen)
            return set()
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if isinstance(node.slice.value, int):
                return self._origins(node.value, node.slice.value, seen)
            return set()
        if isinstance(node, ast.Call):
            return self._origins_of_call(node, index, seen)
        return {node} if isinstance(node, ast.Constant) else set()

    def _origins_of_call(
        self, node: ast.Call, index: int | None, seen: set[tuple[ast.AST, int | None]]
    ) -> set[ast.expr]:
        full = self.qualified(node.func) or ""
        last = full.rsplit(".", 1)[-1] if full else (self.dotted(node.func) or "")
        if (full in _WRAPPERS or last in _PASS_THROUGH) and node.args:
            return self._origins(node.args[0], index, seen)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_MODEL and not full:
            return self._origins(node.func.value, index, seen)
        called = self.called(node)
        if called is not None and called.name != "__init__":
            found: set[ast.expr] = set()
            for each in ast.walk(called):
                is_own = isinstance(each, ast.Return) and self.function(each) is called
                if is_own and isinstance(each, ast.Return) and each.value is not None:
                    found |= self._origins(each.value, index, seen)
            return found or {node}
        return {node}

    # --- backward passes ------------------------------------------------------------------------

    @cached_property
    def backwards(self) -> list[ast.Call]:
        """The calls of `.backward()`."""
        return [
            call
            for call in self.calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        ]

    def reaches_backward(self, node: ast.AST) -> bool:
        """Whether a backward pass happens in it, also in the script's functions it calls."""
        return self._reaches(node, set())

    def _reaches(self, node: ast.AST, seen: set[ast.AST]) -> bool:
        for each in ast.walk(node):
            if not isinstance(each, ast.Call):
                continue
            if each in self.backwards:
                return True
            called = self.called(each)
            if called is not None and called not in seen:
                seen.add(called)
                if self._reaches(called, seen):
                    return True
        return False

"""What is the same on every rank of a script, and what comes from a rank's own samples."""

import ast
from functools import cached_property

from paceline.adapt.roles import Roles
from paceline.adapt.script import Function, Place, Script


class Alike:
    """Answers for one script, which change as expressions are reduced over the ranks."""

    def __init__(self, script: Script, roles: Roles) -> None:
        self.script = script
        self.roles = roles
        self.reduced: set[ast.AST] = set()
        """Expressions that are reduced over the ranks, and so equal on all of them."""

    def forget(self) -> None:
        """Ask anew what differs: more is reduced than before."""
        self.__dict__.pop("varying", None)

    @cached_property
    def varying(self) -> set[Place]:
        """Places whose value comes from this rank's samples, so that ranks hold different ones."""
        found: set[Place] = set()
        for loop in self.roles.batch_loops:
            targets = [loop.target]
            if (
                isinstance(loop.iter, ast.Call)
                and self.script.dotted(loop.iter.func) == "enumerate"
            ):
                if isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
                    targets = [loop.target.elts[1]]
            elif (
                isinstance(loop.target, ast.Tuple)
                and isinstance(loop.iter, ast.Call)
                and isinstance(loop.iter.args[0] if loop.iter.args else None, ast.Call)
                and self.script.dotted(loop.iter.args[0].func) == "enumerate"  # type: ignore[attr-defined]
                and len(loop.target.elts) == 2
            ):
                targets = [loop.target.elts[1]]
            elif self._enumerated(loop.iter) and isinstance(loop.target, ast.Tuple):
                targets = loop.target.elts[1:]
            for target in targets:
                found |= {
                    place
                    for node in ast.walk(target)
                    if isinstance(node, ast.Name) and (place := self.script.place(node)) is not None
                }
        for call in self.roles.next_calls:
            stmt = self.script.statement(call)
            if isinstance(stmt, ast.Assign):
                found |= {
                    place
                    for target in stmt.targets
                    for node in ast.walk(target)
                    if isinstance(node, ast.Name) and (place := self.script.place(node)) is not None
                }
        return self._spread(found)

    def _enumerated(self, node: ast.expr) -> bool:
        """Whether a progress bar over `enumerate(...)` is what is looped over."""
        place = self.script.place(node)
        bound = self.script.bindings.get(place, []) if place is not None else []
        return any("enumerate" in ast.unparse(each.value) for each in bound)

    def _spread(self, places: set[Place]) -> set[Place]:
        """Those that get something of them, again and again until no more are found."""
        while True:
            before = len(places)
            for place, values in self.script.bindings.items():
                if place not in places and any(self.varies(b.value, places) for b in values):
                    places.add(place)
            for node in ast.walk(self.script.tree):
                if isinstance(node, ast.AugAssign) and self.varies(node.value, places):
                    place_of = self.script.place(node.target)
                    if place_of is not None:
                        places.add(place_of)
            if len(places) == before:
                return places

    def varies(self, node: ast.expr, places: set[Place] | None = None) -> bool:
        """Whether an expression holds something of this rank's own samples."""
        known = self.varying if places is None else places
        todo: list[ast.AST] = [node]
        while todo:
            each = todo.pop()
            if each in self.reduced:
                continue
            if isinstance(each, ast.Call):
                called = self.script.called(each)
                if called is not None and called.name != "__init__":
                    if any(
                        isinstance(back, ast.Return)
                        and back.value is not None
                        and self.script.function(back) is called
                        and self.varies(back.value, known)
                        for back in ast.walk(called)
                        if back is not each and not self._recursive(called, each)
                    ):
                        return True
                    continue
                if self.script.qualified(each.func) == "builtins.len":
                    continue
            if isinstance(each, (ast.Name, ast.Attribute)):
                place = self.script.place(each)
                if place is not None and place in known:
                    return True
            todo.extend(ast.iter_child_nodes(each))
        return False

    def _recursive(self, function: Function, call: ast.Call) -> bool:
        return any(node is function for node in self.script.up(call))

    def plain(self, node: ast.expr, seen: frozenset[Place] = frozenset()) -> bool:
        """Whether it is made of counters, constants and options alone: the same on all ranks."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)):
            if self.script.qualified(node) is not None:
                return True
            place = self.script.place(node)
            if place is None or place in seen:
                return place in seen
            if isinstance(node, ast.Attribute) and place[0].startswith("of "):
                return self.plain(node.value, seen) or self._is_options(node.value)
            values = self.script.bindings.get(place, [])
            inside = seen | {place}
            if place in self.varying:
                return False
            if not values:
                return self._is_counter(place) or self._is_parameter(place)
            added = [
                node
                for node in ast.walk(self.script.tree)
                if isinstance(node, ast.AugAssign) and self.script.place(node.target) == place
            ]
            given = [(each.value, each.stmt) for each in values]
            given += [(each.value, each) for each in added]
            return all(
                self.plain(value, inside) and self._plainly_reached(stmt, inside)
                for value, stmt in given
            )
        if isinstance(node, ast.Call):
            name = self.script.dotted(node.func) or ""
            if name in ("len", "isinstance", "hasattr"):
                return True
            if name in ("min", "max", "int", "range", "getattr"):
                return all(self.plain(each, seen) for each in node.args)
            return name.endswith(("parse_args", "exists", "isfile", "is_available"))
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp)):
            return all(
                self.plain(child, seen)
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.expr)
            )
        return False

    def _plainly_reached(self, stmt: ast.AST, seen: frozenset[Place]) -> bool:
        """Whether every condition around it, in its function, is plain as well."""
        for parent in self.script.up(stmt):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return True
            if not isinstance(parent, (ast.If, ast.While)) or "__name__" in ast.unparse(
                parent.test
            ):
                continue
            if not self.plain(parent.test, seen):
                return False
        return True

    def _is_options(self, node: ast.expr) -> bool:
        """`args` of argparse, a module, or a configuration: named so, or made by `parse_args`."""
        return any(
            isinstance(origin, ast.Call)
            and (
                (self.script.dotted(origin.func) or "").endswith("parse_args")
                or (
                    (self.script.dotted(origin.func) or "") in self.script.classes
                    and not self.script.is_module_class(self.script.dotted(origin.func) or "")
                )
            )
            for origin in self.script.origins(node)
        )

    def _is_parameter(self, place: Place) -> bool:
        """A parameter that no call of the script gives: its default, or the caller's constant."""
        function = next(
            (
                each
                for each in self.script.every_function
                if self.script.scope_name(each) == place[0]
            ),
            None,
        )
        return function is not None and place[1] in {each.arg for each in function.args.args}

    def _is_counter(self, place: Place) -> bool:
        """A loop's number: over `range`, or the first of `enumerate`."""
        for node in ast.walk(self.script.tree):
            if not isinstance(node, ast.For):
                continue
            for target in ast.walk(node.target):
                if isinstance(target, ast.Name) and self.script.place(target) == place:
                    return place not in self.varying
        return False

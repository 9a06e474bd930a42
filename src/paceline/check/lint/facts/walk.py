"""Walks through a program as it would run and notes what happens: the makings of `Program`.

Branches are walked one after the other and what they assign is joined; a loop whose body reads what
its last round left is walked twice, and the events of the second walk count; own functions at each
call, so that what a name holds is known for that call. Nothing is executed.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.check.lint.facts import (
    comparisons,
    counters,
    expressions,
    follow,
    imports,
    iteration,
    managers,
    matching,
    rounds,
)
from paceline.check.lint.facts.choices import either
from paceline.check.lint.facts.events import (
    Assign,
    Call,
    Class,
    Event,
    Exit,
    Frame,
    Function,
    Guard,
    Loop,
    Scope,
)
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.source import Source, is_main_test, path_of, text
from paceline.check.lint.facts.values import Value
from paceline.check.lint.facts.walker import Trial

MAX_EVENTS = 60_000
"""A guess that keeps one file under a few seconds."""


class Walk:
    """One reading of one file. `run()` fills `events`."""

    def __init__(self, source: Source, files: Files) -> None:
        self.tree = source.tree
        self.files = files
        self.main_path = source.path
        self.imported: dict[str, Scope] = {}
        self.foreign = 0
        """Statements of other files that were walked through."""
        self.events: list[Event] = []
        self.functions: list[Function] = []
        self.classes: list[Class] = []
        self.main = Scope(path=source.path)
        self.scope = self.main
        self.guards: list[Guard] = []
        self.loops: list[Loop] = []
        self.withs: list[Value] = []
        self.frames: list[Frame] = []
        self.root = 0
        self.returned: list[list[tuple[Value, Guard | None]]] = []
        self.global_names: list[set[str]] = []
        self.instances: dict[Class, Value] = {}
        self.trial: Trial | None = None

    def run(self) -> None:
        """The module as it stands, then every function and method that nothing called."""
        self.block(self.tree.body)
        seen: set[Function] = set()
        while True:
            left = [one for one in self.functions if not one.runs and one not in seen]
            if not left or len(self.events) > MAX_EVENTS:
                return
            function = next((one for one in left if one.own_class is None), left[0])
            seen.add(function)
            self.run_alone(function)

    def run_alone(self, function: Function) -> None:
        """A function that nothing calls: its parameters are unknown."""
        if isinstance(function.node, ast.Lambda):
            return
        self.root += 1
        self.guards, self.loops, self.withs, self.frames = [], [], [], []
        self.scope = self.main
        given: list[Value] = []
        if function.own_class is not None and not function.has_decorator("staticmethod"):
            given = [self.instance_of(function.own_class)]
        if not function.runs:
            self.enter(function.decorated or function, given, {}, None)

    def instance_of(self, own_class: Class) -> Value:
        """Some instance of an own class: one the program made, or one with unknown arguments."""
        if own_class not in self.instances:
            follow.instantiate(self, own_class, [], {}, None)
        return self.instances[own_class]

    @property
    def path(self) -> str:
        """The file that is being walked through."""
        return self.scope.module.path

    @contextmanager
    def set_apart(self, scope: Scope) -> Iterator[None]:
        """Walk through another file: under no condition, in no loop, called by nobody."""
        kept = (self.scope, self.guards, self.loops, self.withs, self.frames)
        more = (self.returned, self.global_names)
        self.scope, self.guards, self.loops, self.withs, self.frames = scope, [], [], [], []
        self.returned, self.global_names = [], []
        yield
        self.scope, self.guards, self.loops, self.withs, self.frames = kept
        self.returned, self.global_names = more

    # what happens

    def context(self, node: ast.AST) -> dict[str, Any]:
        """Where and under what an event happens, as its arguments."""
        return {
            "node": node,
            "order": len(self.events),
            "guards": tuple(self.guards),
            "loops": tuple(self.loops),
            "withs": tuple(self.withs),
            "frames": tuple(self.frames),
            "root": self.root,
        }

    def value(self, node: ast.AST | None) -> Value:
        """What an expression holds."""
        return expressions.evaluate(self, node)

    def attribute(self, base: Value, name: str, node: ast.AST | None) -> Value:
        return expressions.attribute_of(self, base, name, node)

    def looked_up(self, node: ast.AST) -> Value | None:
        """What a plain expression holds, without noting that it was asked for."""
        return expressions.evaluate_quietly(self, node)

    def enter(
        self,
        function: Function,
        args: Sequence[Value],
        kwargs: Mapping[str, Value],
        call: Call | None = None,
    ) -> Value:
        """Walk through an own function with these arguments; what it returns."""
        return follow.enter(self, function, list(args), kwargs, call)

    def assign(self, target: ast.expr, value: Value, node: ast.AST) -> None:
        """Bind a target of an assignment, a loop or a `with`."""
        if isinstance(target, ast.Starred):
            rest = Value(sources=(value,), items=value.items, taints=value.taints)
            self.assign(target.value, rest, node)
        elif isinstance(target, ast.Tuple | ast.List):
            starred = [i for i, one in enumerate(target.elts) if isinstance(one, ast.Starred)]
            parts = iteration.unpacked(value, len(target.elts), *starred[:1])
            for one, part in zip(target.elts, parts, strict=True):
                self.assign(one, part, node)
        elif isinstance(target, ast.Name):
            if not value.label:
                value.label = target.id
            self.note_assign(target.id, None, None, value, node)
            self.bind(target.id, value)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            self.note_assign(text(target), owner, target.attr, value, node)
            for held in owner.any():
                old = held.fields.get(target.attr)
                if self.trial is not None:
                    self.trial.fields.setdefault((id(held), target.attr), (held, old))
                held.fields[target.attr] = self.or_as_before(old, value)
        elif isinstance(target, ast.Subscript):
            owner, index = self.value(target.value), self.value(target.slice)
            self.note_assign(text(target), owner, None, value, node)
            for held in owner.any():
                held.taints = held.taints | value.taints
                if held.entries is not None and isinstance(index.const, str):
                    held.entries[index.const] = value
                else:
                    held.sources = (*held.sources, value)[-20:]

    def or_as_before(self, old: Value | None, value: Value) -> Value:
        """A field that is assigned in a branch, or after an early exit, may keep what it held."""
        guard = next((one for one in reversed(self.guards) if may_be_passed_by(one)), None)
        if guard is None or old is None:
            return value
        first, second = (value, old) if guard.holds else (old, value)
        return either(first, second, guard.test)

    def is_mine(self, guard: Guard) -> bool:
        """Whether a condition stands in the function that is being walked."""
        return guard.depth == len(self.frames)

    def note_assign(
        self, target: str, owner: Value | None, attribute: str | None, value: Value, node: ast.AST
    ) -> None:
        self.events.append(
            Assign(
                target=target, owner=owner, attribute=attribute, value=value, **self.context(node)
            )
        )

    def bind(self, name: str, value: Value) -> None:
        if self.global_names and name in self.global_names[-1]:
            self.scope.module.names[name] = value
            return
        self.scope.names[name] = value

    # statements

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Statements in order. Conditions left behind by early exits stay in `guards`."""
        for statement in body:
            if len(self.events) > MAX_EVENTS:
                return
            if path_of(statement) != self.main_path:
                self.foreign += 1
            name = f"do_{type(statement).__name__.lower()}"
            handler = getattr(self, name, None)
            if handler is not None and handler(statement) is True:
                return

    def do_expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def do_assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value, node)

    def do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value), node)
        elif isinstance(node.target, ast.Name) and self.scope is not self.scope.module:
            self.bind(node.target.id, Value(label=node.target.id))

    def do_augassign(self, node: ast.AugAssign) -> None:
        old, more = self.value(node.target), self.value(node.value)
        self.assign(node.target, expressions.binary(node, node.op, old, more), node)

    def do_global(self, node: ast.Global) -> None:
        if self.global_names:
            self.global_names[-1].update(node.names)

    def do_assert(self, node: ast.Assert) -> None:
        self.value(node.test)

    def do_import(self, node: ast.Import) -> None:
        imports.bind_import(self, node)

    def do_importfrom(self, node: ast.ImportFrom) -> None:
        imports.bind_from_import(self, node)

    def do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        made = self.function(node, None)
        self.bind(node.name, Value(function=made.decorated or made, label=node.name))

    do_asyncfunctiondef = do_functiondef

    def function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, own_class: Class | None
    ) -> Function:
        decorators = tuple(self.value(one) for one in node.decorator_list)
        made = Function(node.name, node, self.scope, own_class, decorators)
        if self.path == self.main_path:
            self.functions.append(made)
        for one in [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]:
            self.value(one)
        follow.replace_decorated(self, made)
        return made

    def do_classdef(self, node: ast.ClassDef) -> None:
        made = Class(node.name, node, tuple(self.value(base) for base in node.bases))
        self.classes.append(made)
        outer, self.scope = self.scope, Scope(outer=self.scope)
        inner = self.scope
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                function = self.function(statement, made)
                function.scope = outer
                made.methods[statement.name] = function.decorated or function
            else:
                self.block([statement])
        made.attributes = inner.names
        self.scope = outer
        self.bind(node.name, Value(own_class=made, label=node.name))

    def do_if(self, node: ast.If) -> bool:
        """Both sides, or the only one that this call takes; whether nothing after it is reached."""
        if self.path != self.main_path and is_main_test(node.test):
            self.block(node.orelse)
            return False
        test = self.value(node.test)
        never = test.name == "typing.TYPE_CHECKING" or test.const is False
        if never and not node.orelse:
            return False
        if comparisons.is_settled(self, node.test, test):
            taken = node.body if test.const else node.orelse
            self.block(taken)
            return exit_of(taken) is not None
        before = self.scope.names
        left_by_body = self.branch(node, test, True, node.body)
        body, body_exit = self.scope.names, exit_of(node.body)
        self.scope.names = dict(before)
        left_by_else = self.branch(node, test, False, node.orelse)
        orelse, else_exit = self.scope.names, exit_of(node.orelse)
        self.scope.names = before
        if body_exit and not else_exit:
            before.update(orelse)
            self.guards += left_by_else
            self.push_exit(node, test, False, body_exit)
        elif else_exit and not body_exit:
            before.update(body)
            self.guards += left_by_body
            self.push_exit(node, test, True, else_exit)
        else:
            self.join(before, body, orelse, test)
        return False

    def branch(
        self, node: ast.AST, test: Value, holds: bool, body: Sequence[ast.stmt]
    ) -> list[Guard]:
        """One side of an `if`; the conditions that its own early exits leave for what follows."""
        self.scope.names = dict(self.scope.names)
        mark = len(self.guards)
        self.guards.append(Guard(test, node, holds, "if", len(self.frames)))
        self.block(body)
        left = self.guards[mark + 1 :]
        del self.guards[mark:]
        return left

    def push_exit(self, node: ast.AST, test: Value, holds: bool, kind: str) -> None:
        self.guards.append(Guard(test, node, holds, "exit", len(self.frames), kind))

    def join(
        self, into: dict[str, Value], body: dict[str, Value], orelse: dict[str, Value], test: Value
    ) -> None:
        """Names after an `if`: what both branches left, joined where they differ."""
        for name in body.keys() | orelse.keys():
            first, second = body.get(name), orelse.get(name)
            if first is None or second is None:
                into[name] = first or second or Value()
            else:
                into[name] = either(first, second, test)

    def do_for(self, node: ast.For | ast.AsyncFor) -> None:
        iterated = self.value(node.iter)
        over, element = iteration.elements(self, iterated, node)
        names = (one.id for one in ast.walk(node.target) if isinstance(one, ast.Name))
        loop = Loop(node, over, tuple(names), len(self.frames))
        mark = len(self.guards)
        self.loops.append(loop)
        counters.count_up(self, node.body)
        self.assign(node.target, element, node)
        rounds.carry(self, node)
        self.block(node.body)
        self.loops.pop()
        self.keep_function_exits(mark)
        self.block(node.orelse)

    do_asyncfor = do_for

    def do_while(self, node: ast.While) -> None:
        loop = Loop(node, None, (), len(self.frames))
        counters.count_up(self, node.body)
        self.loops.append(loop)
        rounds.carry(self, node)
        self.loops.pop()
        test = self.value(node.test)
        mark = len(self.guards)
        self.loops.append(loop)
        self.guards.append(Guard(test, node, True, "while", len(self.frames)))
        self.block(node.body)
        self.loops.pop()
        del self.guards[mark]
        self.keep_function_exits(mark)
        self.block(node.orelse)

    def keep_function_exits(self, mark: int) -> None:
        """After a loop, only conditions of a `return` or `raise` still hold."""
        kept = [one for one in self.guards[mark:] if one.exits in {"return", "raise", "exit"}]
        self.guards[mark:] = kept

    def do_with(self, node: ast.With | ast.AsyncWith) -> None:
        mark = len(self.withs)
        entered: list[Value] = []
        for item in node.items:
            entered.append(self.value(item.context_expr))
            held = managers.enter(self, entered[-1])
            if item.optional_vars is not None:
                self.assign(item.optional_vars, held, node)
        self.block(node.body)
        del self.withs[mark:]
        for one in reversed(entered):
            managers.leave(self, one)

    do_asyncwith = do_with

    def do_try(self, node: ast.Try) -> None:
        self.block(node.body)
        for handler in node.handlers:
            mark = len(self.guards)
            self.guards.append(
                Guard(Value(node=handler), handler, True, "except", len(self.frames))
            )
            if handler.name:
                self.bind(handler.name, Value(label=handler.name))
            self.block(handler.body)
            del self.guards[mark:]
        self.block(node.orelse)
        self.block(node.finalbody)

    do_trystar = do_try

    def do_match(self, node: ast.Match) -> None:
        self.block(matching.as_branches(node))

    def do_return(self, node: ast.Return) -> None:
        value = self.value(node.value)
        if self.returned and node.value is not None:
            mine = [one for one in self.guards if self.is_mine(one)]
            nested = any(one.how != "exit" for one in mine[:-1])  # by more than one condition
            self.returned[-1].append((value, mine[-1] if mine and not nested else None))
        self.note_exit(node, "return")

    def do_continue(self, node: ast.Continue) -> None:
        self.note_exit(node, "continue")

    def do_break(self, node: ast.Break) -> None:
        self.note_exit(node, "break")

    def do_raise(self, node: ast.Raise) -> None:
        self.value(node.exc)
        self.note_exit(node, "raise")

    def note_exit(self, node: ast.AST, kind: str) -> None:
        self.events.append(Exit(kind=kind, **self.context(node)))

    def note_call(self, call: Call) -> None:
        self.events.append(call)


def may_be_passed_by(guard: Guard) -> bool:
    """Whether a program goes on where a condition does not hold."""
    if guard.how == "if":
        return not (isinstance(guard.node, ast.If) and is_main_test(guard.node.test))
    return guard.how == "exit" and guard.exits not in {"raise", "exit"}


def exit_of(body: Sequence[ast.stmt]) -> str | None:
    """How a block always ends early (return, continue, break, raise, exit), or None."""
    for statement in body:
        if isinstance(statement, ast.Return):
            return "return"
        if isinstance(statement, ast.Continue):
            return "continue"
        if isinstance(statement, ast.Break):
            return "break"
        if isinstance(statement, ast.Raise):
            return "raise"
        if isinstance(statement, ast.Expr) and is_process_exit(statement.value):
            return "exit"
        if isinstance(statement, ast.If):
            first, second = exit_of(statement.body), exit_of(statement.orelse)
            if first and second:
                return first if first == second else "return"
        if isinstance(statement, ast.With):
            inner = exit_of(statement.body)
            if inner:
                return inner
    return None


def is_process_exit(node: ast.expr) -> bool:
    names = {"sys.exit", "exit", "quit", "os._exit"}
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names

"""What happens in a program, in the order in which it would happen: calls, assignments, exits."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.check.lint.facts.choices import implies_alone
from paceline.check.lint.facts.names import RANK_CALLS, RANK_NAMES
from paceline.check.lint.facts.source import path_of
from paceline.check.lint.facts.values import DATA, DIVERGENT, RANK, UNKNOWN, Value


@dataclass(eq=False, slots=True)
class Scope:
    """Names of a module, function or class body, and the scope around it."""

    names: dict[str, Value] = field(default_factory=dict)
    outer: "Scope | None" = None
    path: str = ""

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None

    @property
    def module(self) -> "Scope":
        """The outermost scope around it: its file's."""
        scope = self
        while scope.outer is not None:
            scope = scope.outer
        return scope


@dataclass(eq=False, slots=True)
class Function:
    """One of the file's own functions, methods or lambdas."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    """Where it was defined: its free names are looked up there."""

    own_class: "Class | None" = None
    decorators: tuple[Value, ...] = ()
    runs: int = 0
    """How often the reading has walked through it."""

    decorated: "Function | None" = None
    """What one of the file's own decorators put in its place."""

    is_decoration: bool = False
    """Whether a decorator put it in another function's place."""

    def has_decorator(self, *endings: str) -> bool:
        """Whether a decorator's qualified name ends so: `has_decorator("no_grad")`."""
        return any((one.name or one.label or "").endswith(endings) for one in self.decorators)


@dataclass(eq=False, slots=True)
class Class:
    """One of the file's own classes."""

    name: str
    node: ast.ClassDef
    bases: tuple[Value, ...] = ()
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)

    def ancestors(self) -> "Iterator[Class]":
        """Itself and the file's own classes that it builds on."""
        yield self
        for base in self.bases:
            for one in base.any():
                if one.own_class is not None and one.own_class is not self:
                    yield from one.own_class.ancestors()

    def library_bases(self) -> set[str]:
        """Qualified names of the library classes that it builds on, over its own ancestors too."""
        return {
            one.name
            for own in self.ancestors()
            for base in own.bases
            for one in base.any()
            if one.name is not None
        }

    def attribute(self, name: str) -> Value | None:
        """What its body, or that of one that it builds on, gives a name."""
        parts = (one.attributes for one in self.ancestors())
        return next((one[name] for one in parts if name in one), None)

    def method(self, name: str) -> Function | None:
        for own in self.ancestors():
            if name in own.methods:
                return own.methods[name]
        return None


class Placed:
    """What stands somewhere in a program."""

    __slots__ = ()
    node: ast.AST

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))

    @property
    def spot(self) -> str:
        """`line 7`, and the file behind it, which a finding shows where it is another than its own:
        `with_spots`."""
        return f"line {self.line}{MARK}{path_of(self.node) or ''}{MARK}"


MARK = "\x1f"
"""Around the file of a spot. ASCII's unit separator, which no path and no sentence has."""


def with_spots(text: str, path: str) -> str:
    """A text whose spots name their file where it is not this one."""
    parts = text.split(MARK)
    for place in range(1, len(parts), 2):
        parts[place] = f" of {parts[place]}" if parts[place] not in {"", path} else ""
    return "".join(parts)


@dataclass(eq=False, slots=True)
class Guard(Placed):
    """A condition under which a statement is reached."""

    test: Value
    node: ast.AST
    """The `if`, `while`, conditional expression, `except` or decorated function."""

    holds: bool
    """Whether the test must be true, or false."""

    how: str
    """if, while, except, exit (what follows `if ...: return`), decorator."""

    depth: int
    """How many calls deep the condition stands; `Event.at_depth` gives the node there."""

    exits: str | None = None
    """For `exit`: return, continue, break, raise."""

    @property
    def main(self) -> bool | None:
        """True: only the main process gets here; False: all but it; None: neither is known."""
        if self.test.main is None:
            return None
        return self.test.main is self.holds

    @property
    def alone(self) -> bool:
        """Whether it lets only a run of a single process pass."""
        return implies_alone(self.test, self.holds)

    @property
    def by_rank(self) -> bool:
        if self.how == "except" or self.exits in {"raise", "exit"} or RANK not in self.test.taints:
            return False
        return decided_by_rank(self.test)

    @property
    def divergent(self) -> frozenset[str]:
        """Why ranks may differ in whether they get here; where one has failed, all are ended."""
        return frozenset() if self.exits in {"raise", "exit"} else self.test.taints & DIVERGENT


def decided_by_rank(test: Value, depth: int = 12) -> bool:
    """Whether a condition asks for the rank itself, not for something merely computed by rank."""
    if test.main is not None:
        return True
    if depth == 0 or RANK not in test.taints:
        return False
    if test.options:
        shown = any(one.const is not UNKNOWN for one in test.any())  # else they may be the same
        chosen = shown and test.test is not None and decided_by_rank(test.test, depth - 1)
        return chosen or any(decided_by_rank(one, depth - 1) for one in test.options)
    if test.operation is None:
        return is_rank_number(test)
    return any(decided_by_rank(one, depth - 1) or is_rank_number(one) for one in test.operation[1:])


def surely_by_rank(test: Value, depth: int = 12) -> bool:
    """Whether ranks differ in a condition in every run: each value it may have asks for the rank.

    `resume is None` asks what was chosen elsewhere, perhaps for all ranks alike.
    """
    if depth == 0 or RANK not in test.taints:
        return False
    if test.options:
        open_ones = [one for one in test.any() if one.const is UNKNOWN]
        return bool(open_ones) and all(surely_by_rank(one, depth - 1) for one in open_ones)
    sign, *parts = test.operation or ("",)
    if sign in {"Is", "IsNot", "In", "NotIn"}:
        return False
    if parts:
        return any(surely_by_rank(one, depth - 1) for one in parts)
    return test.main is not None or is_rank_number(test)


def is_rank_number(value: Value, depth: int = 8) -> bool:
    """A rank, or arithmetic on one: `rank % 2`."""
    if RANK not in value.taints or depth == 0:
        return False
    if value.options:
        return any(is_rank_number(one, depth - 1) for one in value.any())
    if DATA in value.taints:
        return False
    if value.operation is not None:
        return any(is_rank_number(one, depth - 1) for one in value.operation[1:])
    made = value.call
    if value.instance == "os.environ":
        return True
    if made is None:
        return is_named_rank(value, depth - 1)
    return made.name in RANK_CALLS or made.name.rpartition(".")[2].lower() in RANK_SOURCES


def is_named_rank(value: Value, depth: int) -> bool:
    """Whether what no call made is a rank: by its name, or as a part or copy of one."""
    if value.items is not None or value.entries is not None:
        return False
    if value.receiver is not None and isinstance(value.attribute, str):
        last = value.attribute.lower()
        return last in RANK_SOURCES
    origins = (value.receiver,) if value.receiver is not None else value.sources
    if not origins:
        last = re.split(r"\W+", value.label.lower().strip("_]'\""))[-1]
        return last in RANK_SOURCES
    return any(is_rank_number(one, depth) for one in origins)


RANK_SOURCES = RANK_NAMES | {
    "get_rank",
    "get_local_rank",
    "get_global_rank",
    "get_node_local_rank",
    "get_group_rank",
    "get_coordinate",
    "get_ordinal",
    "current_device",
    "gethostname",
    "int",
    "str",
}
"""Last parts of the names of functions that give a rank."""


@dataclass(eq=False, slots=True)
class Loop(Placed):
    """A `for` or `while` loop, or a comprehension."""

    node: ast.AST
    over: Value | None
    """What it runs over, `enumerate`, `tqdm` and the like taken off; None for `while`."""

    targets: tuple[str, ...]
    depth: int

    @property
    def over_batches(self) -> bool:
        return self.over is not None and self.over.has_kind("loader", "dataset", "engine")

    @property
    def is_comprehension(self) -> bool:
        return not isinstance(self.node, ast.For | ast.AsyncFor | ast.While)


@dataclass(eq=False, slots=True)
class Frame:
    """One call of an own function on the way to an event."""

    function: Function
    call: "Call | None"
    num_withs: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Event(Placed):
    """Something that happens at one place of the program, under these conditions."""

    node: ast.AST
    order: int
    guards: tuple[Guard, ...]
    loops: tuple[Loop, ...]
    withs: tuple[Value, ...]
    """What the surrounding `with` statements enter; decorators like `@torch.no_grad()` too."""

    frames: tuple[Frame, ...]
    """The own functions on the way here, outermost first."""

    root: int = 0
    """0 for what the module runs; each function that nobody calls is a root of its own."""

    @property
    def column(self) -> int:
        return int(getattr(self.node, "col_offset", 0)) + 1

    def at_depth(self, depth: int) -> ast.AST:
        """The node that leads here, `depth` calls deep: a call of an own function, or itself.

        Inside what a decorator wraps around a function, that function's own line is shown.
        """
        while 0 < depth <= len(self.frames) and self.frames[depth - 1].function.is_decoration:
            depth += 1
        if depth < len(self.frames) and self.frames[depth].call is not None:
            call = self.frames[depth].call
            assert call is not None
            return call.node
        return self.node

    @property
    def function(self) -> Function | None:
        """The own function it stands in; None at module level."""
        return self.frames[-1].function if self.frames else None


@dataclass(eq=False, slots=True, kw_only=True)
class Call(Event):
    """A call, its arguments resolved."""

    name: str
    """Qualified name (`torch.distributed.barrier`, `accelerate.Accelerator.save_state`);
    `?.backward` for a method of something unknown; `own.main` for own functions."""

    callee: Value
    receiver: Value | None = None
    method: str | None = None
    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    keyword_nodes: dict[str, ast.AST] = field(default_factory=dict)
    open_ended: bool = False
    """A `*args` or `**kwargs` that reading could not resolve was passed."""

    result: Value = field(default_factory=Value)
    own: Function | None = None
    forward_of: Value | None = None
    """The model whose forward pass this call is."""

    def argument(self, position: int | None, *names: str) -> Value | None:
        """The argument at this position, or by one of these names; None where it is left out."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return None

    def has_argument(self, position: int | None, *names: str) -> bool:
        """Whether it is passed, or may be in something that reading could not resolve."""
        return self.open_ended or self.argument(position, *names) is not None

    def is_method(self, *names: str) -> bool:
        return self.method in names


@dataclass(eq=False, slots=True, kw_only=True)
class Assign(Event):
    """A name or attribute is given a value."""

    target: str
    """As written: `vocab`, `self.model`, `model.require_backward_grad_sync`."""

    owner: Value | None
    """What the attribute or item belongs to; None for a plain name."""

    attribute: str | None
    value: Value


@dataclass(eq=False, slots=True, kw_only=True)
class Exit(Event):
    """A `return`, `continue`, `break` or `raise`."""

    kind: str


def exclusive(first: Call, second: Call) -> bool:
    """Whether the two stand on different sides of one condition."""
    sides = {id(one.test): one.holds for one in first.guards}
    return any(sides.get(id(one.test), one.holds) is not one.holds for one in second.guards)

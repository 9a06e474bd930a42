"""What the parts of the walk ask of it: its state, and to read on.

Reading is recursive: an expression calls a function, whose body holds expressions. The parts know
this interface alone; `walk.py` knows them, and is it.
"""

import ast
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.check.lint.facts.events import Call, Class, Event, Frame, Function, Guard, Loop, Scope
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.values import Value


@dataclass(slots=True)
class Trial:
    """What a walk through a loop's body, for its effects alone, has changed and puts back."""

    runs: dict[Function, int] = field(default_factory=dict)
    fields: dict[tuple[int, str], tuple[Value, Value | None]] = field(default_factory=dict)


class Walker(Protocol):
    """One reading of one file, under way. `Walk` says what each of its methods does."""

    files: Files
    main_path: str
    """The file that is read; others are walked through where it uses them."""

    imported: dict[str, Scope]
    foreign: int
    """Statements of other files that were walked through."""

    events: list[Event]
    functions: list[Function]
    classes: list[Class]
    scope: Scope
    guards: list[Guard]
    loops: list[Loop]
    withs: list[Value]
    frames: list[Frame]
    root: int
    returned: list[list[tuple[Value, Guard | None]]]
    """What each function on the way has returned, and under which condition."""

    global_names: list[set[str]]
    instances: dict[Class, Value]
    trial: Trial | None

    @property
    def path(self) -> str: ...
    def context(self, node: ast.AST) -> dict[str, Any]: ...
    def value(self, node: ast.AST | None) -> Value: ...
    def attribute(self, base: Value, name: str, node: ast.AST | None) -> Value: ...
    def looked_up(self, node: ast.AST) -> Value | None: ...
    def enter(
        self,
        function: Function,
        args: Sequence[Value],
        kwargs: Mapping[str, Value],
        call: Call | None = None,
    ) -> Value: ...
    def set_apart(self, scope: Scope) -> AbstractContextManager[None]: ...
    def assign(self, target: ast.expr, value: Value, node: ast.AST) -> None: ...
    def bind(self, name: str, value: Value) -> None: ...
    def block(self, body: Sequence[ast.stmt]) -> None: ...
    def note_call(self, call: Call) -> None: ...

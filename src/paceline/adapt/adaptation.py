"""What all concerns of one adaptation share: the script, the edits, and what was said of them."""

import ast
from dataclasses import dataclass, field

from paceline.adapt.edits import Edits
from paceline.adapt.rank_invariant import Alike
from paceline.adapt.result import Done, Left, Target
from paceline.adapt.roles import Roles
from paceline.adapt.script import Function, Script


@dataclass(slots=True)
class Work:
    """Filled by one concern after another; nothing is changed before all have spoken."""

    script: Script
    roles: Roles
    alike: Alike
    edits: Edits
    target: Target
    mark: Target
    """What was asked for; a program for Paceline takes the form of DDP."""

    name: str
    """Name of the file that the script becomes."""

    done: list[Done] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    """Names that the script now uses, to be defined at its top."""

    agreed: set[ast.expr] = field(default_factory=set)
    """Conditions that take rank 0's answer."""

    loaders: list[ast.Call] = field(default_factory=list)
    """Loaders that Accelerate still has to prepare."""

    removed: set[ast.stmt] = field(default_factory=set)

    @property
    def accelerate(self) -> bool:
        return self.target is Target.ACCELERATE

    @property
    def fsdp2(self) -> bool:
        return self.target is Target.FSDP2

    def use(self, name: str) -> str:
        """The name of a helper, which the script then gets."""
        self.helpers.add(name)
        return name

    @property
    def device(self) -> str:
        if self.accelerate:
            self.use("accelerator")
            return "accelerator.device"
        return self.use("THIS_DEVICE")

    @property
    def is_main(self) -> str:
        if self.accelerate:
            self.use("accelerator")
            return "accelerator.is_main_process"
        self.use("RANK")
        return "RANK == 0"

    @property
    def is_other(self) -> str:
        return "not accelerator.is_main_process" if self.is_main[0] == "a" else "RANK != 0"

    def say(self, node: ast.AST, what: str) -> None:
        self.done.append(Done(getattr(node, "lineno", 1), what))

    def leave(self, node: ast.AST, why: str, what: str | None = None) -> None:
        """What stands there is left as it is, and said."""
        if what is None:
            text = " ".join(self.script.source.split("\n")[node.lineno - 1].split())  # type: ignore[attr-defined]
            what = text if len(text) <= 80 else text[:77] + "..."
        entry = Left(getattr(node, "lineno", 1), what, why)
        if entry not in self.left:
            self.left.append(entry)

    def inner(self, node: ast.expr) -> str:
        """A model's text without `.module`, and under what takes its wrapping off."""
        while isinstance(node, ast.Attribute) and node.attr == "module":
            node = node.value
        text = self.edits.text(node)
        if self.fsdp2:
            return text
        if self.accelerate:
            self.use("accelerator")
            return f"accelerator.unwrap_model({text})"
        return f"{self.use('unwrapped')}({text})"

    def only_on_main(self, stmt: ast.stmt) -> None:
        """Put a statement under a condition that holds in one process."""
        if self.edits.stands_alone(stmt):
            self.edits.before(stmt, [f"if {self.is_main}:"])
            self.edits.indent(stmt, stmt, "    ")
        else:
            self.leave(stmt, "several statements share a line: give this one its own, under "
                             f"`if {self.is_main}:`")  # fmt: skip

    def guards(self, node: ast.AST) -> list[ast.If | ast.While]:
        """The conditions under which it happens, in its function and at the calls of it."""
        found: list[ast.If | ast.While] = []
        seen: set[Function] = set()
        todo: list[ast.AST] = [node]
        while todo:
            each = todo.pop()
            child = each
            for parent in self.script.up(each):
                if isinstance(parent, (ast.If, ast.While)) and child is not parent.test:
                    found.append(parent)
                if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    if parent not in seen:
                        seen.add(parent)
                        todo.extend(self.script.calls_of(parent))
                    break
                child = parent
        return found

    def agree(self, test: ast.expr) -> None:
        """All ranks take rank 0's answer to a condition."""
        if test in self.agreed:
            return
        self.agreed.add(test)
        self.edits.wrap(test, f"{self.use('agreed')}(", ")")
        self.say(test, "all ranks follow rank 0's decision here: it rests on computed numbers")

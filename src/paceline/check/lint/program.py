"""The program model of one file: facts for the rules, no rules.

    program = read_program("train.py", source)
    program.calls("torch.distributed.barrier")     # every call of it, under any imported name
    program.calls(method="backward")               # methods of whatever it is called on
    program.loops, program.assigns, program.exits, program.classes, program.functions

The file is walked through in the order in which it would run (`walk.py`), own functions at each
call of theirs, so one line may give several events. An event (`Call`, `Assign`, `Exit`) knows

- `guards`: the conditions under which it is reached; a guard's `main` is True where only the main
  process gets there, `divergent` says why ranks may differ (`values.DIVERGENT`), early `return`
  and `continue` leave guards (`how == "exit"`), an `except` is one (`how == "except"`);
- `loops`, innermost last; `loop.over_batches`; `withs`, what the surrounding `with`s entered;
- `frames`: the own functions on the way; `event.at_depth(guard.depth)` is the node in the
  function where a guard stands, the place to show to a reader.

A call's arguments are `Value`s: `call.argument(2, "shuffle")` is found by position or name and
through `**kwargs` dicts; `value.const`, `value.likely()` (argparse default), `value.kind`,
`value.may_be("torch.utils.data.DistributedSampler")`, `value.wrapped_by("ddp")`, `value.inner`,
`value.taints`, `value.origins()`. What reading does not tell is unknown, and a rule stays silent.

A rule:

    def check_sampler_and_shuffle(program: Program, context: Context) -> Iterator[Finding]:
        for call in program.calls(DATALOADER):
            shuffle, sampler = call.argument(2, "shuffle"), call.argument(3, "sampler")
            if shuffle is not None and shuffle.const is True and sampler is not None:
                yield program.finding(
                    "sampler-and-shuffle", Severity.ERROR, call,
                    what="...", fix="leave out shuffle=True",
                )

and its row in `rules/__init__.py`.
"""

import ast
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import StringIO

from paceline.check.finding import Evidence, Finding, Place, Severity
from paceline.check.lint.context import launch_in_text
from paceline.check.lint.events import Assign, Call, Class, Event, Exit, Function, Guard, Loop
from paceline.check.lint.names import ACCELERATOR, COLLECTIVES
from paceline.check.lint.values import Value
from paceline.check.lint.walk import Walk


class Unreadable(ValueError):
    """A file that is no Python program. `line` is where reading stopped."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(eq=False)
class Program:
    """What one file does, in the order in which it would do it."""

    path: str
    text: str
    tree: ast.Module
    events: list[Event]
    functions: list[Function]
    classes: list[Class]

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def all_calls(self) -> list[Call]:
        return [one for one in self.events if isinstance(one, Call)]

    @cached_property
    def assigns(self) -> list[Assign]:
        return [one for one in self.events if isinstance(one, Assign)]

    @cached_property
    def exits(self) -> list[Exit]:
        return [one for one in self.events if isinstance(one, Exit)]

    @cached_property
    def loops(self) -> list[Loop]:
        """Every loop that has an event inside, in order, once for each walk through it."""
        return list(dict.fromkeys(loop for event in self.events for loop in event.loops))

    @cached_property
    def imports(self) -> frozenset[str]:
        """Top-level packages that the file imports: `{"torch", "accelerate"}`."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {one.name.split(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
        return frozenset(found)

    def calls(self, *names: str, method: str | tuple[str, ...] | None = None) -> list[Call]:
        """Calls of one of these qualified names, or of a method called so on anything."""
        wanted = (method,) if isinstance(method, str) else method or ()
        return [
            one
            for one in self.all_calls
            if one.name in names or (one.method is not None and one.method in wanted)
        ]

    def has_call(self, *names: str, method: str | tuple[str, ...] | None = None) -> bool:
        return bool(self.calls(*names, method=method))

    @cached_property
    def forwards(self) -> list[Call]:
        """Calls of models: `model(x)`."""
        return [one for one in self.all_calls if one.forward_of is not None]

    @cached_property
    def backwards(self) -> list[Call]:
        """`loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`."""
        return [one for one in self.all_calls if one.method == "backward"]

    @cached_property
    def steps(self) -> list[Call]:
        """`optimizer.step()`, `scaler.step(optimizer)`; schedulers' steps are not among them."""
        return [one for one in self.all_calls if is_optimizer_step(one)]

    @cached_property
    def collectives(self) -> list[Call]:
        return [one for one in self.all_calls if one.name in COLLECTIVES]

    @cached_property
    def wraps(self) -> list[Call]:
        """Calls that make a distributed model: DDP(...), FSDP(...), fully_shard(...)."""
        return [
            one
            for one in self.all_calls
            if one.result.wrapper in {"ddp", "fsdp1", "fsdp2"} and one.name in WRAPPERS
        ]

    @cached_property
    def framework(self) -> str | None:
        """Who owns the training loop's distribution, or None for plain PyTorch.

        accelerate, lightning, fabric, transformers, deepspeed, ray, horovod, tensorflow, mlx.
        """
        for name, marks in FRAMEWORKS.items():
            if any(one.name.startswith(marks) for one in self.all_calls):
                return name
            bases = {base for own in self.classes for base in own.library_bases()}
            if any(base.startswith(marks) for base in bases):
                return name
        return None

    @cached_property
    def is_distributed(self) -> bool:
        """Whether several ranks run it: a process group, or a wrapped model."""
        return bool(
            self.wraps
            or self.has_call("torch.distributed.init_process_group")
            or any(one.name.startswith("torch.distributed.") for one in self.all_calls)
            or self.framework is not None
        )

    @cached_property
    def launch(self) -> str | None:
        """The launch line that a comment or docstring of the file gives."""
        for text in self.comments:
            line = launch_in_text(text)
            if line is not None:
                return line
        return launch_in_text(ast.get_docstring(self.tree) or "")

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, keyword and short text of the code, in lower case."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            for field in ("id", "attr", "arg", "name"):
                word = getattr(node, field, None)
                if isinstance(word, str):
                    found.add(word.lower())
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value[:80].lower())
        return frozenset(found)

    def mentions(self, *parts: str) -> bool:
        """Whether one of its words holds one of these."""
        return any(part in word for word in self.words for part in parts)

    @cached_property
    def comments(self) -> list[str]:
        try:
            tokens = list(tokenize.generate_tokens(StringIO(self.text).readline))
        except (tokenize.TokenError, SyntaxError):
            return []
        return [one.string for one in tokens if one.type == tokenize.COMMENT]

    def place(self, node: "ast.AST | Event | Guard | Loop") -> Place:
        where = node.node if isinstance(node, Event | Guard | Loop) else node
        line = getattr(where, "lineno", 1)
        before = self.line_text(line).encode()[: getattr(where, "col_offset", 0)]
        return Place(path=self.path, line=line, column=len(before.decode(errors="replace")) + 1)

    def line_text(self, line: int) -> str:
        """A line as it stands; `ast` counts columns in its bytes of UTF-8, people in letters."""
        lines = self.lines
        return lines[line - 1] if 0 < line <= len(lines) else ""

    def line_of(self, node: "ast.AST | Event | Guard | Loop") -> str:
        line = self.place(node).line or 1
        return self.lines[line - 1].strip() if line <= len(self.lines) else ""

    def finding(
        self,
        id: str,
        severity: Severity,
        at: "ast.AST | Event | Guard | Loop",
        *,
        what: str,
        fix: str,
        seen: "Iterable[ast.AST | Event | Guard | Loop]" = (),
    ) -> Finding:
        """A finding at a node; `seen` are further lines that show it."""
        evidence = [Evidence(where=self.place(one), text=self.line_of(one)) for one in (at, *seen)]
        return Finding(
            id=id,
            severity=severity,
            where=self.place(at),
            what=what,
            fix=fix,
            evidence=tuple(dict.fromkeys(evidence)),
        )


WRAPPERS = frozenset(
    {
        "torch.nn.parallel.DistributedDataParallel",
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_shard",
        "apex.parallel.DistributedDataParallel",
        "torch.distributed._composable.replicate",
    }
)

FRAMEWORKS = {
    "lightning": ("lightning.pytorch.Trainer", "lightning.pytorch.LightningModule"),
    "fabric": ("lightning.fabric.Fabric",),
    "transformers": ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl."),
    "accelerate": (ACCELERATOR,),
    "deepspeed": ("deepspeed.initialize",),
    "ray": ("ray.train",),
    "horovod": ("horovod.torch.init", "horovod.tensorflow"),
    "tensorflow": ("tensorflow.distribute", "tensorflow.keras"),
    "mlx": ("mlx.core.distributed",),
}


def is_optimizer_step(call: Call) -> bool:
    """Whether a `.step(...)` steps an optimizer, alone or through a scaler."""
    if call.method != "step" or call.receiver is None:
        return False
    if call.receiver.has_kind("scheduler"):
        return False
    if call.receiver.has_kind("optimizer", "scaler"):
        return True
    if call.receiver.wrapped_by("deepspeed"):
        return True
    return "opt" in call.receiver.label.lower() and "sched" not in call.receiver.label.lower()


def read_program(path: str, source: bytes | str) -> Program:
    """The model of a Python file.

    Raises:
        Unreadable: It is no Python 3, or no text.
    """
    text = source if isinstance(source, str) else decoded(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes and literals
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(error.msg, error.lineno) from error
    except (ValueError, RecursionError, MemoryError) as error:
        deep = "its expressions are nested too deeply to be parsed"
        what = str(error) if isinstance(error, ValueError) else deep
        raise Unreadable(what, None) from error
    walk = Walk(tree)
    try:
        walk.run()
    except (RecursionError, MemoryError) as error:
        raise Unreadable("its expressions are nested too deeply to follow", None) from error
    return Program(
        path=path,
        text=text,
        tree=tree,
        events=walk.events,
        functions=walk.functions,
        classes=walk.classes,
    )


def decoded(source: bytes) -> str:
    """The text of a Python file, by its coding line; UTF-8 where it has none."""
    if b"\0" in source:
        raise Unreadable("it holds zero bytes: a binary file", None)
    try:
        encoding, _ = tokenize.detect_encoding(iter(source.splitlines(keepends=True)).__next__)
        return source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(f"it cannot be decoded: {error}", None) from error


def until(events: Iterable[Event], order: int) -> Iterator[Event]:
    """Events that come before one."""
    return (one for one in events if one.order < order)


def value_names(value: Value) -> Iterator[str]:
    """The names a value and its sources go by, as the program writes them."""
    return (one.label for one in value.origins() if one.label)

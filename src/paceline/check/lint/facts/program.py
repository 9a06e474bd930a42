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
                    "sampler-and-shuffle", call,
                    what="...", fix="leave out shuffle=True",
                )

and its row in `rules/__init__.py`.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.check.finding import Evidence, Finding, Place, Severity, lint_level
from paceline.check.lint.context import launch_in_text
from paceline.check.lint.facts.events import (
    Assign,
    Call,
    Class,
    Event,
    Exit,
    Function,
    Guard,
    Loop,
    with_spots,
)
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.names import ACCELERATOR, COLLECTIVES
from paceline.check.lint.facts.source import Source, Unreadable, comments_in, parse, path_of
from paceline.check.lint.facts.walk import Walk


@dataclass(eq=False)
class Program:
    """What one file does, in the order in which it would do it."""

    source: Source
    helpers: Mapping[str, Source]
    """Files that it imports and that were followed, by path."""

    events: list[Event]
    """Its own, and those of functions of other files that it calls."""

    functions: list[Function]
    """Its own."""

    classes: list[Class]
    """Its own, and those of the files that were followed."""

    joint_kinds: dict[Call, str | None] = field(default_factory=dict)
    """What `rules.agreement.joint_kind` has found."""

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def text(self) -> str:
        return self.source.text

    @property
    def tree(self) -> ast.Module:
        return self.source.tree

    def nodes(self) -> Iterator[ast.AST]:
        """Every node of the file and of those that it imports."""
        for one in (self.source, *self.helpers.values()):
            yield from one.nodes

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
        by_name, by_method = self._calls_by
        found = {
            one.order: one
            for table, keys in ((by_name, names), (by_method, wanted))
            for key in keys
            for one in table.get(key, ())
        }
        return [found[order] for order in sorted(found)]

    @cached_property
    def _calls_by(self) -> tuple[dict[str, list[Call]], dict[str, list[Call]]]:
        """Calls by their qualified name, and by their method."""
        by_name: dict[str, list[Call]] = {}
        by_method: dict[str, list[Call]] = {}
        for one in self.all_calls:
            by_name.setdefault(one.name, []).append(one)
            if one.method is not None:
                by_method.setdefault(one.method, []).append(one)
        return by_name, by_method

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
        if launch_in_text(self.text) is not None:  # quicker than to part comments from code
            for text in comments_in(self.text).values():
                line = launch_in_text(text)
                if line is not None:
                    return line
        return launch_in_text(ast.get_docstring(self.tree) or "")

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, keyword and short text of the code, in lower case."""
        return self.source.words.union(*(one.words for one in self.helpers.values()))

    def mentions(self, *parts: str) -> bool:
        """Whether one of its words holds one of these."""
        files = (self.source, *self.helpers.values())
        wanted = [part.lower() for part in parts]
        there = [part for part in wanted if any(part in one.lower_text for one in files)]
        return bool(there) and any(part in word for word in self.words for part in there)

    def place(self, node: "ast.AST | Event | Guard | Loop") -> Place:
        where = node.node if isinstance(node, Event | Guard | Loop) else node
        line = getattr(where, "lineno", 1)
        path = path_of(where) or self.path
        before = self.line_text(path, line).encode()[: getattr(where, "col_offset", 0)]
        return Place(path=path, line=line, column=len(before.decode(errors="replace")) + 1)

    def line_text(self, path: str, line: int) -> str:
        """A line as it stands; `ast` counts columns in its bytes of UTF-8, people in letters."""
        lines = self.helpers.get(path, self.source).lines
        return lines[line - 1] if 0 < line <= len(lines) else ""

    def line_of(self, node: "ast.AST | Event | Guard | Loop") -> str:
        place = self.place(node)
        return self.line_text(place.path, place.line or 1).strip()

    def finding(
        self,
        id: str,
        at: "ast.AST | Event | Guard | Loop",
        what: str,
        fix: str,
        *,
        seen: "Iterable[ast.AST | Event | Guard | Loop]" = (),
        first: str | None = None,
        level: Severity = Severity.ERROR,
    ) -> Finding:
        """A finding at a node; `seen` are further lines that show it."""
        evidence = [Evidence(where=self.place(one), text=self.line_of(one)) for one in (at, *seen)]
        where = self.place(at)
        return Finding(
            id=id,
            severity=lint_level(id, level),
            where=where,
            what=with_spots(what, where.path),
            fix=fix,
            evidence=tuple(dict.fromkeys(evidence)),
            first=first,
        )


OWNERS = frozenset({"accelerate", "fabric", "lightning", "transformers", "ray", "deepspeed"})
"""Frameworks that set each process's device, scale its loss, and give every rank its part of a
plain DataLoader and its epoch."""

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
    "lightning": tuple(
        f"lightning.pytorch.{n}" for n in ("Trainer", "LightningModule", "cli.LightningCLI")
    ),
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


def read_program(path: str, source: bytes | str, files: Files | None = None) -> Program:
    """The model of a Python file, and of what it uses of the files that are linted with it.

    Raises:
        Unreadable: It is no Python 3, or no text.
    """
    files = files or Files({path: source})
    own = files.source(path) or parse(path, source)
    walk = Walk(own, files if own.is_started else Files({}))  # others follow what is imported
    try:
        walk.run()
    except (RecursionError, MemoryError) as error:
        raise Unreadable("its expressions are nested too deeply to follow", None) from error
    return Program(
        source=own,
        helpers={one: each for one in walk.imported if (each := files.source(one)) is not None},
        events=of_processes(walk.events),
        functions=walk.functions,
        classes=walk.classes,
    )


def of_processes(events: list[Event]) -> list[Event]:
    """Without the run of one process: a function that is started as processes and also called
    directly (`mp.spawn(run, ...)` or else `run(0, ...)`) is alone in the second."""
    started = {
        one.function
        for call in events
        if isinstance(call, Call) and call.name == "torch.multiprocessing.spawn"
        for target in (call.argument(0, "fn"),)
        for one in (target.any() if target is not None else ())
    }
    return [
        event
        for event in events
        if not any(
            each.function in started and each.call is not None and each.call.own is each.function
            for each in event.frames
        )
    ]

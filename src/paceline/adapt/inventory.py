"""What a program has of a training: framework, loops, devices, loaders, optimizers, saves.

Taken from the program model that `lint` reads (`check/lint/facts/program.py`), so names are known
under whatever a file imports them. Judges nothing; what `adapt` would do is asked in `scan.py`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.adapt.script import Script
from paceline.catalog.load import read_shipped
from paceline.check.lint.facts.events import Call, Loop
from paceline.check.lint.facts.names import canonical, kind_of
from paceline.check.lint.facts.program import Program, is_optimizer_step
from paceline.check.lint.facts.source import path_of
from paceline.check.lint.facts.values import stops_gradients


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One thing at one line."""

    line: int
    what: str
    """The library's name of it: `torch.utils.data.DataLoader`; `.to` for a method of what reading
    does not tell."""

    text: str


@dataclass(frozen=True, slots=True, order=True)
class FoundLoop:
    """A loop, or the call or method by which a library runs it."""

    line: int
    end_line: int
    role: Literal["training", "outer", "evaluation"]
    """`training`: the loop around the backward pass, or a library's; `outer` holds one that trains;
    `evaluation` goes over batches and computes no gradients."""

    over: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One file's parts, each in the order of its lines."""

    framework: str | None
    """pytorch, jax, tensorflow, mlx; None where it imports none of them."""

    owner: str | None
    """What distributes the training, or runs its loop: accelerate, lightning, fabric, transformers,
    deepspeed, ray, horovod, tensorflow, mlx; None for a plain loop."""

    loops: tuple[FoundLoop, ...]
    devices: tuple[Item, ...]
    loaders: tuple[Item, ...]
    optimizers: tuple[Item, ...]
    wrapping: tuple[Item, ...]
    saves: tuple[Item, ...]
    loads: tuple[Item, ...]
    launch: tuple[Item, ...]

    @property
    def trains(self) -> bool:
        """Whether a loop in it trains, by itself or through a file that it imports."""
        return any(loop.role != "evaluation" for loop in self.loops)


_TABLES: dict[str, dict[str, str]] = read_shipped("inventory.toml")
_FRAMEWORKS = {name: packages.split() for name, packages in _TABLES["frameworks"].items()}
_MATCHES = {part: re.compile(names, re.VERBOSE) for part, names in _TABLES["names"].items()}
_METHODS = {part: methods.split() for part, methods in _TABLES["methods"].items()}

_KINDS = {"loader": "loaders", "sampler": "loaders", "optimizer": "optimizers"}
_GRADIENTS = re.compile(
    r"""jax\.(grad|value_and_grad)|optax\.apply_updates|mlx\.optimizers\.\w+\.update
    |.*\.(backward|apply_gradients)""",
    re.VERBOSE,
)
"""Calls after which parameters have gradients, or are changed by them."""

_LIBRARYS_LOOP = re.compile(
    r"""transformers\.(Seq2Seq)?Trainer\.train|trl\.(\w+\.)*\w+Trainer\.train
    |lightning\.pytorch\.Trainer\.fit|ray\.train\.(\w+\.)*\w+Trainer\.fit
    |(tensorflow\.)?keras\.(\w+\.)*\w+\.fit""",
    re.VERBOSE,
)
"""Calls by which a library runs the loop."""

_WIDEST = 60
"""Letters of what a loop goes over."""


def inventory(program: Program) -> Inventory:
    """The parts of one file; those of the files that it imports are theirs."""
    parts: dict[str, set[Item]] = {name: set() for name in _MATCHES}
    for node, name, method, is_placing in _calls(program):
        part = _part(name, method) or ("devices" if is_placing else None)
        if part is not None:
            is_name = _MATCHES[part].fullmatch(name) or method is None or part in _KINDS.values()
            line = getattr(node.func, "end_lineno", None) or node.lineno
            shown = name if is_name else f".{method}"
            parts[part].add(Item(line, shown, program.line_text(program.path, line).strip()))
    if program.launch is not None:
        parts["launch"].add(Item(_line_of(program.launch, program), "a comment", program.launch))
    return Inventory(
        framework=_framework(program),
        owner=program.framework,
        loops=tuple(sorted(set(_loops(program)))),
        **{name: tuple(sorted(found)) for name, found in parts.items()},
    )


def _library_name(call: Call, program: Program) -> str:
    """The name of what is called; of the program's own class, that of the library's which it is
    made of: `transformers.Trainer.train` for its own kind of Trainer."""
    _, own, rest = call.name.partition("own.")
    if not own:
        return call.name
    name, dot, method = rest.partition(".")
    for each in program.classes:
        if each.name == name and not (dot and each.method(method)):
            for base in sorted(each.library_bases()):
                if base.startswith(
                    ("transformers.", "trl.", "lightning.", "tensorflow.", "keras.")
                ):
                    return f"{base}{dot}{method}"
    return call.name


def _calls(program: Program) -> Iterator[tuple[ast.Call, str, str | None, bool]]:
    """Each call of the file: node, library's name, method, and whether it moves something to a
    device. What the reading did not come to, as under `if False:`, is named by imports alone."""
    seen: set[ast.AST] = set()
    for call in program.all_calls:
        if isinstance(call.node, ast.Call) and path_of(call.node) == program.path:
            seen.add(call.node)
            is_placing = call.method == "to" and _is_to_device(call)
            yield call.node, _library_name(call, program), call.method, is_placing
    left = [each for each in program.source.nodes if isinstance(each, ast.Call)]
    if len(left) == len(seen):
        return
    script = Script(program.text)
    for node in left:
        if node not in seen:
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            is_placing = method == "to" and "dev" in " ".join(
                ast.unparse(each) for each in node.args
            )
            yield node, canonical(script.qualified(node.func) or f"?.{method}"), method, is_placing


def _part(name: str, method: str | None) -> str | None:
    for part, names in _MATCHES.items():
        if names.fullmatch(name):
            return part
    kind = kind_of(name)
    if kind in _KINDS and name.rpartition(".")[2][:1].isupper():
        return _KINDS[kind]
    return next((part for part, methods in _METHODS.items() if method in methods), None)


def _line_of(text: str, program: Program) -> int:
    lines = program.source.lines
    return next((number for number, line in enumerate(lines, 1) if text in line), 1)


def _is_to_device(call: Call) -> bool:
    """`.to(device)`, and not `.to(torch.float16)`."""
    given = call.argument(0, "device")
    return given is not None and any(
        one.kind == "device"
        or any(word in one.label.lower() for word in ("dev", "rank", "gpu"))
        or str(one.const).split(":")[0] in ("cuda", "cpu", "mps", "xpu")
        or (isinstance(one.const, int) and not isinstance(one.const, bool))
        for one in given.any()
    )


def _framework(program: Program) -> str | None:
    for name, packages in _FRAMEWORKS.items():
        if program.imports & set(packages):
            return name
    return "pytorch" if "transformers" in program.imports else None


def _loops(program: Program) -> Iterator[FoundLoop]:
    steps = [call for call in program.all_calls if _is_step(call)]
    around = [[loop for loop in call.loops if not loop.is_comprehension] for call in steps]
    holds = {id(loop.node) for loops in around for loop in loops}
    nearest = {id(loops[-1].node) for loops in around if loops}
    forward = {id(loop.node) for call in program.forwards for loop in call.loops}
    drawn = {id(call.loops[-1].node) for call in program.forwards if _evaluates_what_it_draws(call)}
    for loop in program.loops:
        if path_of(loop.node) != program.path or loop.is_comprehension:
            continue
        if id(loop.node) in nearest or (id(loop.node) in holds and loop.over_batches):
            yield _found(loop.node, "training", _over(loop))
        elif id(loop.node) in holds:
            yield _found(loop.node, "outer", _over(loop))
        elif id(loop.node) in drawn or (
            loop.over_batches and (_reads_loader(loop) or id(loop.node) in forward)
        ):
            yield _found(loop.node, "evaluation", _over(loop))
    for call in program.all_calls:
        name = _library_name(call, program)
        if path_of(call.node) == program.path and _LIBRARYS_LOOP.fullmatch(name):
            yield _found(call.node, "training", f"{name}()")
    for own in program.classes:
        step = own.methods.get("training_step")
        is_lightning = any(base.startswith("lightning.") for base in own.library_bases())
        if step is not None and is_lightning and path_of(own.node) == program.path:
            yield _found(step.node, "training", f"{own.name}.training_step")


def _evaluates_what_it_draws(call: Call) -> bool:
    """Whether a model is called without gradients on what each turn of the loop makes anew, as
    `get_batch()` does; generation reads what the turn before has left, a benchmark one input."""
    if not call.loops or not any(stops_gradients(each) for each in call.withs):
        return False
    loop = call.loops[-1]
    here = call.at_depth(loop.depth)
    if loop.is_comprehension or not isinstance(here, ast.Call):
        return False
    bound: dict[str, list[ast.Assign]] = {}
    for node in ast.walk(loop.node):
        if isinstance(node, ast.Assign):
            for name in set().union(*(_names(each) for each in node.targets)):
                bound.setdefault(name, []).append(node)
    given: list[ast.expr] = [*here.args, *(each.value for each in here.keywords)]
    todo = {(name, here.lineno) for each in given for name in _names(each)}
    is_new, seen = False, set[tuple[str, int]]()
    while todo:
        name, line = read = todo.pop()
        before = [each for each in bound.get(name, ()) if each.lineno < line]
        if name in bound and name not in loop.targets and not before:
            return False  # the turn before left it
        is_new = is_new or name in bound or name in loop.targets
        seen.add(read)
        if before:
            last = max(before, key=lambda each: each.lineno)
            todo |= {(each, last.lineno) for each in _names(last.value)} - seen
    return is_new


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _reads_loader(loop: Loop) -> bool:
    """A loop over a dataset may only prepare it."""
    return loop.over is not None and loop.over.has_kind("loader", "engine")


def _is_step(call: Call) -> bool:
    """A call after which parameters have gradients; an optimizer's step that takes a closure."""
    takes_closure = is_optimizer_step(call) and any(one.function for one in call.args)
    return takes_closure or _GRADIENTS.fullmatch(call.name) is not None


def _found(node: ast.AST, role: Literal["training", "outer", "evaluation"], over: str) -> FoundLoop:
    first = int(getattr(node, "lineno", 1))
    return FoundLoop(first, int(getattr(node, "end_lineno", first)), role, over)


def _over(loop: Loop) -> str:
    node = loop.node
    head = node.iter if isinstance(node, ast.For | ast.AsyncFor) else getattr(node, "test", node)
    text = " ".join(ast.unparse(head).split())
    text = f"while {text}" if isinstance(node, ast.While) else text
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."

"""The beginning and the end: ranks meet, helpers stand below the imports, all leave together."""

import ast
import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from paceline.adapt.adaptation import Work
from paceline.adapt.data import epoch_loop
from paceline.adapt.devices import uses_no_gpu
from paceline.adapt.launch_command import start_command
from paceline.adapt.result import Done, Left, Refusal, Target
from paceline.adapt.script import bound_by
from paceline.catalog.load import read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """One name that the script gets, as `helpers.toml` has it."""

    text: Annotated[str, str] = ""
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@cache
def helpers_of(target: Target) -> Mapping[str, Helper]:
    """Name -> helper of a form, in the order in which they are defined."""
    forms = (target,) if target is Target.ACCELERATE else ("torchrun", target)
    rows = read_rows("helpers.toml", Helper, key=None)
    keys = [key.partition(".") for key in rows]
    return {name: rows[f"{form}.{name}"] for form, _, name in keys if form in forms}


ON_CPU: Mapping[str, str] = {
    'torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")': (
        'torch.device("cpu")'
    ),
    "cpu=not torch.accelerator.is_available()": "cpu=True",
}
"""What changes in the helpers of a script that trains on the CPU."""


def with_needs(target: Target, names: Iterable[str]) -> list[str]:
    """The names and all that they need, in the order they are defined."""
    table = helpers_of(target)
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(table[name].needs)
    return [name for name in table if name in found]


def bound_names(target: Target, names: Iterable[str]) -> list[str]:
    """What the helpers bind in the script: their own names and those of their imports."""
    table = helpers_of(target)
    found: list[str] = []
    for name in names:
        found.append(name)
        if name == "RANK":
            found += ["LOCAL_RANK", "WORLD_SIZE"]
        for line in table[name].imports:
            found += [each.strip() for each in line.rsplit(" ", 1)[-1:]]
    return found


MARK = "# paceline adapt: "
"""Begins the comment that tells an adapted script from one that was written so."""

_SEEDS = ("manual_seed", "seed_everything", "set_seed", "seed_all", "fix_seed", "set_random_seed")


def meet_and_leave(work: Work) -> None:
    """Call `join_ranks` before anything is built, and `leave_ranks` after everything is done."""
    lines = _first_lines(work)
    guard = _guard(work)
    if guard is not None and lines and not _builds_above(work, guard):
        first = guard.body[0]
        work.edits.before(first, lines)
        lines = []
    _leave(work)
    _seed_of_ranks(work)
    _write_helpers(work, lines)


def _first_lines(work: Work) -> list[str]:
    lines = []
    work.use("join_ranks")
    if not work.accelerate:
        lines.append("join_ranks()")
        work.done.insert(0, _said("the ranks meet: nccl on GPUs, gloo without"))
    seeded = any(
        (work.script.dotted(call.func) or "").rsplit(".", 1)[-1] in _SEEDS
        for call in work.script.calls
    )
    if not seeded:
        lines.append(f"{work.use('share_seed')}()")
        work.done.insert(0, _said("the script sets no seed: all ranks take rank 0's"))
    return lines


def _said(what: str) -> Done:
    return Done(1, what)


def _guard(work: Work) -> ast.If | None:
    """`if __name__ == "__main__":`."""
    for stmt in work.script.tree.body:
        if isinstance(stmt, ast.If) and "__name__" in ast.unparse(stmt.test):
            return stmt
    return None


def _builds_above(work: Work, guard: ast.If) -> bool:
    """Whether a model or a loader is made at the top of the module, before the guard."""
    script = work.script
    made = [*work.roles.models, *work.roles.optimizers, *work.roles.train_loaders]
    return any(script.function(each) is None and guard not in script.up(each) for each in made)


def _leave(work: Work) -> None:
    script, edits = work.script, work.edits
    name = work.use("leave_ranks")
    guard = _guard(work)
    body = guard.body if guard is not None else script.tree.body
    last = body[-1]
    holders = _holders(work, body)
    lines = [f"del {', '.join(holders)}"] if holders else []
    lines.append(f"{name}()")
    ends = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and (
        script.qualified(last.value.func) == "sys.exit" or script.dotted(last.value.func) == "exit"
    )  # fmt: skip
    if ends and isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        if last.value.args:
            edits.before(last, [f"exit_code = {edits.text(last.value.args[0])}", *lines])
            edits.replace(last.value.args[0], "exit_code")
        else:
            edits.before(last, lines)
    else:
        edits.after(last, lines)
    if {"click", "typer", "fire", "absl"} & {
        full.split(".")[0] for full in script.imports.values()
    }:
        work.leave(
            last,
            "the command line's library may end the program here: call "
            f"{name}() as the last thing that main() does",
        )
    work.say(last, "all ranks leave together, with the model let go before the interpreter ends")


def _holders(work: Work, body: list[ast.stmt]) -> list[str]:
    """Names of the module that hold the model, or an object that may."""
    script = work.script
    found: list[str] = []
    tops = {("", name.id) for stmt in body for name in ast.walk(stmt)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            and script.function(name) is None}  # fmt: skip
    for place in sorted(tops):
        for bound in script.bindings.get(place, []):
            origins = script.origins(bound.value, bound.index)
            holds = bool(origins & work.roles.models) or any(
                isinstance(o, ast.Call)
                and (script.dotted(o.func) or "") in script.classes
                and script.reaches_backward(script.classes[script.dotted(o.func) or ""])
                for o in origins
            )
            if holds and place[1] not in found:
                found.append(place[1])
    return found


def _seed_of_ranks(work: Work) -> None:
    """Dropout draws differ between ranks from here on; weights and splits were drawn alike."""
    script = work.script
    if work.accelerate or "dropout" not in script.source.lower():
        return
    loop = next(iter(work.roles.batch_loops), None)
    if loop is None:
        return
    outer, _ = epoch_loop(work, loop)
    top: ast.stmt = outer if outer is not None else loop
    if any(call in ast.walk(top) for call in work.roles.optimizers):
        return
    work.use("RANK")
    work.edits.before(
        top, ["torch.manual_seed(torch.initial_seed() + RANK)  # dropout differs by rank"]
    )
    work.use("THIS_DEVICE")
    work.say(top, "from here on ranks draw different random numbers, for dropout")


def _write_helpers(work: Work, calls: list[str]) -> None:
    script = work.script
    names = with_needs(work.target, work.helpers)
    _check_names(work, names)
    table = helpers_of(work.target)
    wanted = sorted({line for name in names for line in table[name].imports}, key=_import_order)
    place = _below_imports(work)
    bound = bound_by(each for each in script.tree.body if each.lineno <= place)
    imports = [line for line in wanted if not _bound_already(line, bound)]
    texts = [table[name].text for name in names if table[name].text]
    if uses_no_gpu(work):
        for gpu, cpu in ON_CPU.items():
            texts = [text.replace(gpu, cpu) for text in texts]
        work.say(
            script.tree.body[0],
            "the script puts nothing on a GPU, so its ranks are on CPUs too: to change that, set "
            f"{work.device} at the top, and move model and batches there",
        )
    start = start_command(work.mark, work.name, "N")
    header = f"{MARK}{work.mark}. One process a device: {start}\n"
    parts = ["\n".join(imports) + "\n" if imports else ""]
    constants = [t for t in texts if not t.startswith(("def ", "class ", "@"))]
    functions = [t for t in texts if t.startswith(("def ", "class ", "@"))]
    parts.append("\n" + header + "".join(constants))
    parts += ["\n\n" + text for text in functions]
    if work.accelerate and "logging" in script.imports:
        calls = [*calls]
        parts[1] += "if not accelerator.is_main_process:\n    logging.disable(logging.INFO)\n"
    if calls:
        parts.append("\n\n" + "\n".join(calls) + "\n")
    work.edits.insert_line(place, "".join(parts))


def _import_order(line: str) -> tuple[bool, str]:
    module = line.split()[1]
    return module.split(".")[0] in ("torch", "accelerate"), line.replace("from ", "import ")


def _bound_already(line: str, bound: dict[str, str]) -> bool:
    words = line.split()
    if words[0] == "import":
        full, name = words[1], words[-1]
        return bound.get(name) == full
    return all(
        bound.get(name) == f"{words[1]}.{name}"
        for name in line.partition(" import ")[2].split(", ")
    )


def _below_imports(work: Work) -> int:
    """The line after which the helpers stand: the last import before the script's own code."""
    last = 0
    for number, stmt in enumerate(work.script.tree.body):
        if isinstance(stmt, (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)):
            break
        if isinstance(stmt, ast.If) and "__name__" in ast.unparse(stmt.test):
            break
        is_text = isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)
        holds_import = isinstance(stmt, (ast.Import, ast.ImportFrom, ast.Try, ast.If)) and any(
            isinstance(each, (ast.Import, ast.ImportFrom)) for each in ast.walk(stmt)
        )
        if (is_text and number == 0) or holds_import:
            last = stmt.end_lineno or last
    return last


def _check_names(work: Work, names: list[str]) -> None:
    """Names that the helpers bind must be free.

    Raises:
        Refusal: The script uses one for something else.
    """
    script = work.script
    wanted = {name for name in bound_names(work.target, names) if not hasattr(builtins, name)}
    clashes: dict[str, int] = {}
    for node in ast.walk(script.tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        if name in wanted and name not in ("torch", "os", "random", "gc", "logging"):
            clashes.setdefault(name, getattr(node, "lineno", 1))
    if clashes:
        raise Refusal(
            *(
                Left(line, f"the name {name}", "the distributed form needs this name: rename yours")
                for name, line in clashes.items()
            )
        )

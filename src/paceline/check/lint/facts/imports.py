"""What imports bind: names of libraries, and those of files that are linted together.

`from utils.comm import is_first` is looked for as Python would from the importing file's folder,
then from each folder above it. What such a file defines is walked through where it is used, once
for each program that uses it, so that what its functions do is judged with what they are given.
"""

import ast

from paceline.check.lint.facts.events import Scope
from paceline.check.lint.facts.names import RANK_NAMES, canonical
from paceline.check.lint.facts.source import Source
from paceline.check.lint.facts.values import RANK, Value
from paceline.check.lint.facts.walker import Walker

MAX_FILES = 40
"""Other files that one program is followed into. A guess: scripts seen reach at most 15."""


def bind_import(walk: Walker, node: ast.Import) -> None:
    """`import a.b`, `import a.b as c`."""
    for alias in node.names:
        path = walk.files.find(walk.path, alias.name)
        top = alias.name.split(".")[0]
        if alias.asname:
            walk.bind(
                alias.asname, Value(name=canonical(alias.name), label=alias.asname, file=path)
            )
        elif path is None or "." not in alias.name:
            walk.bind(top, Value(name=top, label=top, file=path))
        else:
            bind_dotted(walk, alias.name, path)
        if path is not None and walk.path == walk.main_path:
            scope_of_file(walk, path)


def bind_dotted(walk: Walker, dotted: str, path: str) -> None:
    """`import utils.comm` binds `utils`, in which `comm` is found."""
    top, *steps = dotted.split(".")
    held = walk.scope.find(top)
    if held is None or held.name != top:
        held = Value(name=top, label=top, file=walk.files.find(walk.path, top))
        walk.bind(top, held)
    for step in steps:
        held = held.fields.setdefault(step, Value(name=f"{held.name}.{step}", label=step))
    held.file = path


def bind_from_import(walk: Walker, node: ast.ImportFrom) -> None:
    """`from a.b import c`: of a library, of a linted file, or a linted file itself."""
    module = "." * node.level + (node.module or "")
    path = walk.files.find(walk.path, node.module or "", node.level)
    for alias in node.names:
        if alias.name == "*":
            if path is not None:
                for name in public_names(scope_of_file(walk, path)):
                    walk.bind(name, Value(name=name, label=name, file=path, member=name))
            continue
        name = alias.asname or alias.name
        value = Value(name=canonical(f"{module}.{alias.name}"), label=name)
        if alias.name.lower() in RANK_NAMES:
            value.taints = frozenset({RANK})
        if path is not None and defines(walk.files.source(path), alias.name):
            value.file, value.member = path, alias.name
        else:
            inside = f"{node.module}.{alias.name}" if node.module else alias.name
            value.file = walk.files.find(walk.path, inside, node.level)
        walk.bind(name, value)
        if value.file is not None and walk.path == walk.main_path:
            scope_of_file(walk, value.file)


def public_names(scope: Scope | None) -> list[str]:
    return [one for one in scope.names if not one.startswith("_")] if scope is not None else []


def defines(source: Source | None, name: str) -> bool:
    """Whether a file binds a name at its top, in an `if` or a `try` there, or imports all of it."""
    return source is not None and (name in source.top_names or "*" in source.top_names)


def scope_of_file(walk: Walker, path: str) -> Scope | None:
    """The names of a linted file, after walking through it; None where it is not followed."""
    if path in walk.imported:
        return walk.imported[path]
    source = walk.files.source(path)
    if source is None or len(walk.imported) >= MAX_FILES:
        return None
    scope = Scope(path=path)
    walk.imported[path] = scope
    with walk.set_apart(scope):
        walk.block(source.tree.body)
    return scope


def member_of(walk: Walker, value: Value) -> Value:
    """What an imported name holds in the file that defines it; the name itself where unknown."""
    for _ in range(8):
        if value.file is None or value.member is None:
            return value
        scope = scope_of_file(walk, value.file)
        found = scope.names.get(value.member) if scope is not None else None
        if found is None or found is value:
            return value
        value = found
    return value


def attribute_of_file(walk: Walker, module: Value, attr: str) -> Value | None:
    """`comm.is_first` where `comm` is a linted file; None where the file has no such name."""
    if module.file is None or module.member is not None:
        return None
    scope = scope_of_file(walk, module.file)
    if scope is not None and attr in scope.names:
        return member_of(walk, scope.names[attr])
    inside = walk.files.find(module.file, attr, 1) if module.file.endswith("__init__.py") else None
    return Value(name=f"{module.name}.{attr}", label=attr, file=inside) if inside else None

"""What imports bind: names of libraries, and those of files that are linted together.

`from utils.comm import is_first` is looked for as Python would from the importing file's folder,
then from each folder above it. What such a file defines is walked through where it is used, once
for each program that uses it, so that what its functions do is judged with what they are given.
"""

import ast
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.check.lint.events import Scope
from paceline.check.lint.names import KNOWN_LIBRARIES, RANK_NAMES, canonical
from paceline.check.lint.source import Source, Unreadable, parse
from paceline.check.lint.values import RANK, Value

if TYPE_CHECKING:
    from paceline.check.lint.walk import Walk

MAX_FILES = 40
"""Other files that one program is followed into. A guess: scripts seen reach at most 15."""


MOST_PARSED_BYTES = 4 * 2**20
"""Sources whose trees are kept for the next program that imports them; a tree takes about 40 times
the text's bytes (measured, CPython 3.11)."""


class Files:
    """The Python files that are linted together, each parsed when it is asked for. The trees of
    those that were asked for last are kept."""

    def __init__(self, texts: Mapping[str, bytes | str]) -> None:
        self.texts = texts
        self.parsed: dict[str, Source | None] = {}
        self.held_bytes = 0
        self.asked: set[str] = set()
        """Files that `source` was asked for; whoever wants to know of a while clears it before."""

    def source(self, path: str) -> Source | None:
        """A file that can be read; None for one that is broken, which is reported by itself."""
        self.asked.add(path)
        if path in self.parsed:
            self.parsed[path] = found = self.parsed.pop(path)  # the last that was asked for
            return found
        try:
            made = parse(path, self.texts[path])
        except Unreadable:
            made = None
        self.parsed[path] = made
        self.held_bytes += len(self.texts[path])
        while self.held_bytes > MOST_PARSED_BYTES and len(self.parsed) > 1:
            oldest = next(iter(self.parsed))
            del self.parsed[oldest]
            self.held_bytes -= len(self.texts[oldest])
        return made

    def find(self, importer: str, module: str, level: int = 0) -> str | None:
        """The file that `module` means in the file `importer`; None where it is none of these.

        Args:
            module: As it is written, `utils.comm`; empty for `from . import x`.
            level: Leading dots.
        """
        folder = importer.rpartition("/")[0]
        steps = module.split(".") if module else []
        if level:
            for _ in range(level - 1):
                folder = folder.rpartition("/")[0]
            return self.file_in(folder, steps)
        if not steps or steps[0] in sys.stdlib_module_names | KNOWN_LIBRARIES:
            return None
        while True:
            found = self.file_in(folder, steps)
            if found is not None and found != importer:
                return found
            if not folder:
                return None
            folder = folder.rpartition("/")[0]

    def file_in(self, folder: str, steps: list[str]) -> str | None:
        stem = "/".join([folder, *steps] if folder else steps)
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self.texts:
                return path
        return None


def bind_import(walk: "Walk", node: ast.Import) -> None:
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


def bind_dotted(walk: "Walk", dotted: str, path: str) -> None:
    """`import utils.comm` binds `utils`, in which `comm` is found."""
    top, *steps = dotted.split(".")
    held = walk.scope.find(top)
    if held is None or held.name != top:
        held = Value(name=top, label=top, file=walk.files.find(walk.path, top))
        walk.bind(top, held)
    for step in steps:
        held = held.fields.setdefault(step, Value(name=f"{held.name}.{step}", label=step))
    held.file = path


def bind_from_import(walk: "Walk", node: ast.ImportFrom) -> None:
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


def scope_of_file(walk: "Walk", path: str) -> Scope | None:
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


def member_of(walk: "Walk", value: Value) -> Value:
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


def attribute_of_file(walk: "Walk", module: Value, attr: str) -> Value | None:
    """`comm.is_first` where `comm` is a linted file; None where the file has no such name."""
    if module.file is None or module.member is not None:
        return None
    scope = scope_of_file(walk, module.file)
    if scope is not None and attr in scope.names:
        return member_of(walk, scope.names[attr])
    inside = walk.files.find(module.file, attr, 1) if module.file.endswith("__init__.py") else None
    return Value(name=f"{module.name}.{attr}", label=attr, file=inside) if inside else None

"""The laws of docs/concepts/architecture.md, held by reading every module's syntax tree."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
ORDER = (
    "errors",
    "units",
    "choices",
    "integrations",
    "job",
    "catalog",
    "profile",
    "prepare",
    "topology",
    "parallel",
    "estimate",
    "plan",
    "prove",
    "render",
    "record",
    "control",
    "simulation",
    "launch",
    "runtime",
    "check",
    "adapt",
    "report",
    "live",
    "mcp",
    "contracts",
    "cli",
)
TORCH_IN = {"prove", "runtime"}
OUTSIDE_WORLD_IN = {
    "integrations",
    "job",
    "catalog",
    "prepare",
    "topology",
    "record",
    "control",
    "launch",
    "runtime",
    "live",
    "mcp",
    "contracts",
    "cli",
}
WORLD_MODULES = {
    "asyncio",
    "fcntl",
    "glob",
    "http",
    "mmap",
    "multiprocessing",
    "requests",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib",
}
FILE_METHODS = {
    "exists",
    "glob",
    "iterdir",
    "mkdir",
    "open",
    "read_bytes",
    "read_text",
    "rglob",
    "stat",
    "touch",
    "unlink",
    "write_bytes",
    "write_text",
}
ALLOWED_UPWARD = {("prove", "runtime")}
"""`prove/` may use `runtime/strategy`, which imports nothing below `parallel/`."""

WRITES_ITS_PAGE = {"report"}
"""`report/` reads a run's record through `record/` and writes one page; its writing is listed in
test_report_writes_only_its_page."""


TORCH_PRIVATE = ROOT / "runtime" / "_torch_private.py"
"""Where each private name of torch stands, with what it is for."""

OVERRIDDEN = {
    node.value
    for node in ast.walk(ast.parse(TORCH_PRIVATE.read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}
"""Every text in it: among them the private methods that classes of ours override."""

OF_MODULES = {"_parameters", "_buffers", "_modules"}
"""Names of `nn.Module` that attributes of ours have too."""

NOT_TORCH = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_can_set_attn_implementation",
    "_can_use_grouped_mm",
    "_grouped_mm",
    "_is_expert_parallel",
    "_keys_to_ignore_on_load_unexpected",
    "_replace",
}
"""Of transformers, which `prove` and `run` take as it is, and of named tuples."""

HANDED_OVER = ROOT / "render" / "scripts"
"""Programs that are written beside an engine's files: texts, which Paceline never imports."""


@cache
def modules() -> tuple[tuple[str, Path, ast.Module], ...]:
    """Package, path and syntax tree of every module, read once for all of these tests."""
    return tuple(_read_modules())


def _read_modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(HANDED_OVER):
            continue
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        yield package, path, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module, wherever in the file; names of `from a import b` as `a.b` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_package_has_its_place_in_the_order():
    found = {package for package, _, _ in modules()} - {"__init__", "__main__"}
    assert found <= set(ORDER)


def test_the_architecture_page_lists_every_package_in_the_order():
    page = ROOT.parents[1] / "docs" / "concepts" / "architecture.md"
    drawn = page.read_text(encoding="utf-8").split("```")[1]
    assert tuple(re.findall(r"(?m)(?:^  |\.py  )(\w+)(?=/|\.py)", drawn)) == ORDER


def test_no_module_imports_a_package_below_it():
    wrong = []
    for package, path, tree in modules():
        if package not in ORDER:
            continue
        for name, line in imports(tree):
            parts = name.split(".")
            if parts[0] != "paceline" or len(parts) < 2 or parts[1] not in ORDER:
                continue
            downward = ORDER.index(parts[1]) > ORDER.index(package)
            if downward and (package, parts[1]) not in ALLOWED_UPWARD:
                wrong.append(f"{place(path, line)} imports {name}")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count, as they only put the circle off, and those for types; of a
    package's `__init__` those for types do not: they name what it imports when it is asked for."""
    names = {dotted(path) for _, path, _ in modules()}
    imported = {
        dotted(path): imported_modules(tree, names, for_types=path.name != "__init__.py")
        for _, path, tree in modules()
    }
    TopologicalSorter(imported).prepare()


LINT = "paceline.check.lint"
BELOW_THE_FACTS = {f"{LINT}.context", f"{LINT}.words"}
"""Modules of lint that its facts engine may import: they import nothing of lint but each other."""


def test_lint_goes_from_facts_to_rules_and_never_back():
    names = {dotted(path) for _, path, _ in modules()}
    imported = {
        module: {one for one in imported_modules(tree, names, for_types=True) if LINT in one}
        for _, path, tree in modules()
        if (module := dotted(path)).startswith(LINT)
    }
    back = {
        f"{module} imports {one}"
        for module, others in imported.items()
        if module.startswith(f"{LINT}.facts") or module in BELOW_THE_FACTS
        for one in others - BELOW_THE_FACTS
        if module in BELOW_THE_FACTS or not one.startswith(f"{LINT}.facts")
    }
    assert not back


def dotted(path: Path) -> str:
    parts = ("paceline", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(tree: ast.AST, names: set[str], *, for_types: bool = False) -> set[str]:
    """Modules of ours that a module imports; of `from package import module` the module alone."""
    found = set()
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names or {node.module or ""}
        elif for_types or not is_for_types(node):
            ahead += ast.iter_child_nodes(node)
    return found & names


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_a_package_of_which_a_module_is_imported_is_no_circle():
    inside = ast.parse("def f():\n    from a import b\n    from a.c import d")
    assert imported_modules(inside, {"a", "a.b", "a.c"}) == {"a.b", "a.c"}


def test_imports_for_types_count_where_they_are_asked_for():
    for_types = ast.parse("if TYPE_CHECKING:\n    from a import b")
    assert not imported_modules(for_types, {"a", "a.b"})
    assert imported_modules(for_types, {"a", "a.b"}, for_types=True) == {"a.b"}


def test_torch_is_imported_only_in_runtime_and_prove():
    wrong = [
        f"{place(path, line)} imports {name}"
        for _, path, tree in modules()
        if not may_use_torch(path)
        for name, line in imports(tree)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong


def test_private_names_of_torch_stand_in_one_module():
    runs = [(path, tree) for _, path, tree in modules() if path != TORCH_PRIVATE]
    ours = {name for path, tree in runs if may_use_torch(path) for name in defined_in(tree)}
    wrong = [
        found
        for path, tree in runs
        if may_use_torch(path)
        for found in private_torch_names(path, tree, ours)
    ]
    assert not wrong


def may_use_torch(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] in TORCH_IN


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Every name that a module gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_torch_names(path: Path, tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Imports from torch's private modules, private attributes that no module of ours defines, and
    such names as texts for `getattr` and `patch.object`. What a class overrides is torch's too."""
    for name, line in imports(tree):
        if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
            yield f"{place(path, line)} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_torchs(node, ours):
            yield f"{place(path, node.lineno)} uses {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            for given in node.args[1:2]:
                text = given.value if isinstance(given, ast.Constant) else None
                if isinstance(text, str) and is_private(text) and text not in ours | NOT_TORCH:
                    yield f"{place(path, node.lineno)} names {text}"


def is_torchs(node: ast.Attribute, ours: set[str]) -> bool:
    owner = ast.unparse(node.value)
    if not is_private(node.attr) or node.attr in NOT_TORCH or owner == "os":
        return False
    if owner == "super()":
        return node.attr not in OVERRIDDEN
    return node.attr not in ours or (owner != "self" and node.attr in OF_MODULES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", "m.py:1 imports torch._dynamo"),
        ("from torch._C import x", "m.py:1 imports torch._C"),
        ("mesh._flatten()", "m.py:1 uses mesh._flatten"),
        ("module._parameters", "m.py:1 uses module._parameters"),
        ("self._ddp_init_helper()", "m.py:1 uses self._ddp_init_helper"),
        ("getattr(x, '_unsharded_param', None)", "m.py:1 names _unsharded_param"),
        ("super()._unheard_of()", "m.py:1 uses super()._unheard_of"),
    ],
)
def test_the_scan_sees_private_names(source: str, expected: str):
    found = private_torch_names(ROOT / "m.py", ast.parse(source), {"_parameters"})
    assert expected in list(found)


BELOW_THE_STRATEGY = ("paceline.runtime.devices", "paceline.runtime._torch_private")
"""Modules of `runtime/` that import nothing of ours."""


def test_the_strategy_imports_nothing_of_ours_below_parallel():
    wrong = []
    for _, path, tree in modules():
        if not path.is_relative_to(ROOT / "runtime" / "strategy"):
            continue
        for name, line in imports(tree):
            parts = name.split(".")
            if parts[0] != "paceline" or len(parts) < 2 or parts[1] not in ORDER:
                continue
            own = name.startswith(("paceline.runtime.strategy", *BELOW_THE_STRATEGY))
            own = own or name == "paceline.runtime"  # as whose part `_torch_private` is imported
            if not own and ORDER.index(parts[1]) > ORDER.index("parallel"):
                wrong.append(f"{place(path, line)} imports {name}")
    assert not wrong


def test_only_the_packages_that_may_touch_files_processes_and_sockets():
    wrong = [
        found
        for package, path, tree in modules()
        if package in ORDER and package not in OUTSIDE_WORLD_IN | WRITES_ITS_PAGE
        for found in touches(path, tree)
    ]
    assert not wrong


def test_report_writes_only_its_page():
    touched = {
        found.split(":")[0]
        for package, path, tree in modules()
        if package == "report"
        for found in touches(path, tree)
    }
    assert touched <= {"report/page.py"}


def touches(path: Path, tree: ast.Module) -> Iterator[str]:
    for name, line in imports(tree):
        if name.split(".")[0] in WORLD_MODULES or name == "os":
            yield f"{place(path, line)} imports {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            yield f"{place(path, node.lineno)} calls open"
        if isinstance(node.func, ast.Attribute) and node.func.attr in FILE_METHODS:
            yield f"{place(path, node.lineno)} calls {node.func.attr}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import subprocess", "m.py:1 imports subprocess"),
        ("from os import path", "m.py:1 imports os"),
        ("text = open('x')", "m.py:1 calls open"),
        ("p.read_text()", "m.py:1 calls read_text"),
    ],
)
def test_the_scan_sees_what_it_forbids(source: str, expected: str):
    assert expected in list(touches(ROOT / "m.py", ast.parse(source)))


def test_no_source_is_a_file_of_another_folder():
    outside = re.compile(r"\b(design|mission|prototypes|reviews)/\w+\.(md|py)")
    cites = {
        str(path.relative_to(ROOT))
        for path in (*ROOT.rglob("*.py"), *ROOT.rglob("*.toml"))
        if outside.search(path.read_text(encoding="utf-8"))
    }
    assert not cites

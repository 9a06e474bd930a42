"""The laws of docs/architecture.md, held by reading every module's syntax tree."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
ORDER = (
    "errors",
    "units",
    "spec",
    "catalog",
    "profile",
    "topology",
    "parallel",
    "estimate",
    "plan",
    "prove",
    "render",
    "record",
    "control",
    "launch",
    "runtime",
    "check",
    "adapt",
    "report",
    "cli",
)
TORCH_IN = {"prove", "runtime"}
OUTSIDE_WORLD_IN = {
    "spec",
    "catalog",
    "topology",
    "record",
    "control",
    "launch",
    "runtime",
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


def test_torch_is_imported_only_in_runtime_and_prove():
    wrong = [
        f"{place(path, line)} imports {name}"
        for package, path, tree in modules()
        if package not in TORCH_IN
        for name, line in imports(tree)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong


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

"""What the source and the pages point to is there, and no module imports itself by a detour."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
ROOT = SOURCE.parents[1]
PACKAGES = {path.name for path in SOURCE.iterdir() if path.is_dir()}
BESIDE = {"docs", "tests", "scripts", "benchmarks", "examples"}
OURS = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*")}

OF_OTHERS = {
    *("arguments.py", "dataclasses.py"),  # Megatron-LM, Accelerate
    *("modeling_layers.py", "modeling_utils.py"),  # transformers
    *("queue.py", "selectors.py"),  # Python
    *("app.py", "paceline_job.py", "recipe.py"),  # written by renderers
    "docs/_tutorials/zero-offload.md",  # DeepSpeed
    "docs/source/api-guide/dist_optimizer.md",  # Megatron-LM
    "docs/user-guide/features/custom_fsdp.md",  # Megatron-LM
    "examples/conversion/convert_checkpoints.py",  # Megatron-Bridge
}

FILE = re.compile(r"(?<![\w/.:@-])(?:[\w.-]+/)*[\w-]+\.(?:py|toml|md)(?![\w/-])")


def pointed_to(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each file of ours that a text points to: a path that begins with a package
    or a folder of the repository, and in backticks also the name of a module alone."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in FILE.finditer(line):
            name, first = found[0], found[0].partition("/")[0]
            is_path = "/" in name and first in PACKAGES | BESIDE
            is_module = "/" not in name and name.endswith(".py") and f"`{name}`" in line
            if is_path or is_module:
                yield number, name


def is_there(name: str) -> bool:
    if name in OF_OTHERS or Path(name).stem == "NAME" or (ROOT / name).exists():
        return True
    return any(each == name or each.endswith(f"/{name}") for each in OURS)


def files() -> Iterator[Path]:
    yield from (path for kind in ("*.py", "*.toml") for path in SOURCE.rglob(kind))
    yield ROOT / "CONTRIBUTING.md"
    yield ROOT / "docs/concepts/architecture.md"


def test_every_file_of_ours_that_is_pointed_to_exists():
    gone = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files()
        if "failures" not in path.parts and not path.is_relative_to(SOURCE / "render/scripts")
        for line, name in pointed_to(path.read_text(encoding="utf-8"))
        if not is_there(name)
    ]
    assert gone == []


def test_no_text_points_to_a_document_that_only_its_writers_had():
    words = re.compile(r"(?i)\bdocument \d{3}\b|\bthe handbook\b|\bissue #?\d+ of ours\b")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files()
        for match in words.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see `runtime/gone.py`", ["runtime/gone.py"]),
        ("as docs/concepts/gone.md says", ["docs/concepts/gone.md"]),
        ("as `gone.py` does", ["gone.py"]),
        ("torch/nn/parallel/distributed.py", []),
    ],
)
def test_the_scan_sees_what_is_pointed_to(text: str, names: list[str]):
    assert [name for _, name in pointed_to(text)] == names
    assert not any(map(is_there, names))


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        if not path.is_relative_to(SOURCE / "render" / "scripts"):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that are imported when a module is: not inside functions, nor for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from imported(getattr(node, name, []))


LINTS_WALK = "paceline.check.lint."
"""One interpreter of programs in several modules, whose parts call one another: `walk.py`."""


def test_no_module_imports_itself_in_a_circle():
    every = modules()
    graph = {}
    for name, path in every.items():
        names = imported(ast.parse(path.read_text(encoding="utf-8")).body)
        whole = {each if each in every else each.rpartition(".")[0] for each in names}
        graph[name] = {each for each in whole if each in every and each != name}
    assert graph["paceline.plan.plan"], "imports were found"
    for name in [each for each in graph if each.startswith(LINTS_WALK)]:
        graph[name] = {each for each in graph[name] if not each.startswith(LINTS_WALK)}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_docstrings_make_sense_alone():
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
            if isinstance(text, str) and re.match(r"\s*(Of|The same)\b", text):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert found == [], "docstrings begin with what they describe, not with Of or The same"

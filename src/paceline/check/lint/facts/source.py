"""A Python file as text and tree, or why it is none."""

import ast
import re
import tokenize
import warnings
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import Any


class Unreadable(ValueError):
    """A file that is not of the language that it is taken for. `line` is where reading stopped."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(eq=False)
class Source:
    """One Python file. Every node of `tree` knows its file: `path_of(node)`."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lower_text(self) -> str:
        return self.text.lower()

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, keyword and short text of the code, in lower case."""
        found: set[str] = set()
        for node in self.nodes:
            for field in ("id", "attr", "arg", "name"):
                word = getattr(node, field, None)
                if isinstance(word, str):
                    found.add(word.lower())
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value[:80].lower())
        return frozenset(found)

    @cached_property
    def top_names(self) -> frozenset[str]:
        """Names that the file binds outside of its functions and classes; `*` for a star import."""
        return frozenset(bound_names(self.tree.body))

    @cached_property
    def is_started(self) -> bool:
        """Whether it does something by itself: a call at its top, a loop, a main section."""
        return not self.path.endswith("__init__.py") and any(
            isinstance(one, ast.For | ast.While | ast.With)
            or (isinstance(one, ast.If) and is_main_test(one.test))
            or (isinstance(one, ast.Expr) and starts_something(one.value))
            for one in self.tree.body
        )


_TRAINING = re.compile(
    rb"distributed(?! (?:under|on)\b)|multiprocessing|[Pp]arallel|DataLoader|Sampler"
    rb"|IterableDataset|num_workers|[Aa]ccelerat(?:e|or)\b|deepspeed|fsdp|FSDP|fully_shard|[Ll]ightning|Trainer\b"
    rb"|horovod|\bray\b|\bmlx\b|tensorflow|\bjax\b|backward\(|optim\b|torch\.(?:save|load)\b"
    rb"|set_device|autocast|GradScaler|local_rank|LOCAL_RANK|webdataset|streaming"
    rb"|environ(?:\[|\.setdefault|\.update| *\|=)|putenv|paceline"
)
"""A rule is about one of these, or about what is reached through one. "Distributed under the
License" is not."""


def is_about_training(source: bytes | str) -> bool:
    """Whether a program holds a word that rules are about; others have no finding and need no
    reading, unless another program imports them."""
    data = source.encode(errors="replace") if isinstance(source, str) else source
    return _TRAINING.search(data) is not None


_OF_TESTS = re.compile(
    r"(^|/)(test_[^/]*|conftest)\.py$|_test\.py$|(^|/)(tests?|testdata|fixtures)/"
)


def is_test(path: str) -> bool:
    """Whether a file holds tests, which call things as training does not: in one process, on made
    up values, to see them fail."""
    return _OF_TESTS.search(path) is not None


SETTINGS = ("logging.", "warnings.", "os.environ.", "sys.path.", "torch.set_", "torch.backends.")


def starts_something(node: ast.expr) -> bool:
    """A call that is more than a setting of a library."""
    return isinstance(node, ast.Call) and not ast.unparse(node.func).startswith(SETTINGS)


def is_main_test(node: ast.AST) -> bool:
    """`__name__ == "__main__"`."""
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id == "__name__"
        and isinstance(node.ops[0], ast.Eq)
    )


def bound_names(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name.split(".")[0] for one in statement.names}
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {one.asname or one.name.split(".")[0] for one in node.names}
    return found


def parse(path: str, source: bytes | str) -> Source:
    """A file as text and tree.

    Raises:
        Unreadable: It is no Python 3, or no text.
    """
    text = source if isinstance(source, str) else decoded(source)
    made = Source(path, text, tree_of(text))
    for node in made.nodes:
        node.path = path  # type: ignore[attr-defined]
    return made


def check_syntax(text: str) -> None:
    """Compile a program without making a tree of it, which takes several times as long.

    Raises:
        Unreadable: It is no Python 3.
    """
    _compiled(text, 0)


def tree_of(text: str) -> ast.Module:
    """A program's tree.

    Raises:
        Unreadable: It is no Python 3.
    """
    tree: ast.Module = _compiled(text, ast.PyCF_ONLY_AST)
    return tree


def _compiled(text: str, flags: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes and literals
            return compile(text, "<unknown>", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        raise Unreadable(error.msg, error.lineno) from error
    except (ValueError, RecursionError, MemoryError) as error:
        deep = "its expressions are nested too deeply to be parsed"
        what = str(error) if isinstance(error, ValueError) else deep
        raise Unreadable(what, None) from error


def comments_in(text: str) -> dict[int, str]:
    """Line -> the comment on it, of a program that can be read."""
    try:
        tokens = tokenize.generate_tokens(StringIO(text).readline)
        return {one.start[0]: one.string for one in tokens if one.type == tokenize.COMMENT}
    except (tokenize.TokenError, SyntaxError):
        return {}


def path_of(node: ast.AST) -> str | None:
    """The file that a node stands in."""
    return getattr(node, "path", None)


def decoded(source: bytes) -> str:
    """The text of a Python file, by its coding line; UTF-8 where it has none."""
    if b"\0" in source:
        raise Unreadable("it holds zero bytes: a binary file", None)
    try:
        encoding, _ = tokenize.detect_encoding(iter(source.splitlines(keepends=True)).__next__)
        return source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(f"it cannot be decoded: {error}", None) from error


def text(node: ast.AST | None) -> str:
    """The expression as source, in one line."""
    return "" if node is None else ast.unparse(node).split("\n")[0]

"""Changes to a text by position: everything that no change names stays as it is, byte for byte."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str
    order: tuple[int, int]
    """Among those at one place: whole lines, then what opens, then what was there."""


@dataclass(slots=True)
class Edits:
    """Changes collected against one source; `apply` makes them all at once."""

    source: str
    lost: list[ast.expr] = field(default_factory=list)
    """Expressions whose place in the text is not known; nothing was changed there."""

    _edits: list[_Edit] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    """Offset of the first character of every line."""

    def __post_init__(self) -> None:
        self._starts = [0]
        for line in self.source.split("\n"):  # as the syntax tree counts them
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._starts[-1] = len(self.source)

    def offset(self, line: int, column_bytes: int) -> int:
        """The character at a place of the syntax tree, whose columns count UTF-8 bytes."""
        start = self._starts[line - 1]
        text = self.source[start : self._starts[line]] if line < len(self._starts) else ""
        return start + len(text.encode()[:column_bytes].decode())

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.decorator_list:
            return self._starts[node.decorator_list[0].lineno - 1]
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self.source[self.start(node) : self.end(node)]

    def is_found(self, node: ast.AST) -> bool:
        """Whether the text at an expression's place is the expression.

        Before Python 3.12 it is not for some in f-strings. Those are kept in `lost`, unchanged.
        """
        if not isinstance(node, ast.expr):
            return True
        try:
            there = ast.parse(f"({self.text(node)})", mode="eval").body
        except (SyntaxError, ValueError, IndexError):
            there = None
        kinds = {"Store": "Load", "Del": "Load"}
        wanted = ast.dump(node)
        for kind, load in kinds.items():
            wanted = wanted.replace(f"ctx={kind}()", f"ctx={load}()")
        if there is not None and ast.dump(there) == wanted:
            return True
        if node not in self.lost:
            self.lost.append(node)
        return False

    def replace(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        if not self.is_found(node):
            return
        self.replace_span(self.start(node), self.end(node), text)

    def replace_span(self, start: int, end: int, text: str) -> None:
        edit = _Edit(start, end, text, (3, len(self._edits)))
        same = [e for e in self._edits if (e.start, e.end, e.text) == (start, end, text)]
        if not same or start == end:
            self._edits.append(edit)

    def wrap(self, node: ast.expr, before: str, after: str) -> None:
        """Text on both sides of an expression; changes inside it still hold."""
        if not self.is_found(node):
            return
        start, end, count = self.start(node), self.end(node), len(self._edits)
        self._edits.append(_Edit(start, start, before, (2, count)))
        self._edits.append(_Edit(end, end, after, (-1, -count)))

    def add_argument(self, last: ast.expr | ast.keyword, text: str) -> None:
        """One more argument behind a call's last one, outside whatever that one is wrapped in."""
        at = self.end(last)
        self._edits.append(_Edit(at, at, f", {text}", (0, len(self._edits))))

    def stands_alone(self, stmt: ast.stmt) -> bool:
        """Whether nothing else stands before it on its line."""
        return not self.source[self._line_start(stmt) : self.start(stmt)].strip()

    def indent_of(self, stmt: ast.stmt) -> str:
        return self.source[self._line_start(stmt) : self.start(stmt)]

    def _line_start(self, stmt: ast.stmt) -> int:
        return self.source.rfind("\n", 0, self.start(stmt)) + 1

    def line_end(self, line: int) -> int:
        """Just past the line's newline."""
        return self._starts[min(line, len(self._starts) - 1)]

    def before(self, stmt: ast.stmt, lines: Sequence[str]) -> None:
        """Whole lines above a statement, indented as it is."""
        if self.stands_alone(stmt):
            indent = self.indent_of(stmt)
            at = self._line_start(stmt)
            text = "".join(f"{indent}{line}\n" if line else "\n" for line in lines)
            self._edits.append(_Edit(at, at, text, (0, len(self._edits))))
        else:  # `if x: y`, `a; b`
            at = self.start(stmt)
            self._edits.append(
                _Edit(at, at, "".join(f"{line}; " for line in lines), (0, len(self._edits)))
            )

    def after(self, stmt: ast.stmt, lines: Sequence[str]) -> None:
        """Whole lines below a statement, indented as it is."""
        assert stmt.end_lineno is not None
        at = self.line_end(stmt.end_lineno)
        if at and self.source[at - 1] != "\n":
            lines = ["", *lines]
        indent = self.indent_of(stmt)
        text = "".join(f"{indent}{line}\n" if line else "\n" for line in lines)
        self._edits.append(_Edit(at, at, text, (0, len(self._edits))))

    def insert_line(self, line: int, text: str) -> None:
        """Text below line `line`, 0 for the top of the file."""
        at = self.line_end(line)
        if at and self.source[at - 1] != "\n":
            text = "\n" + text
        self._edits.append(_Edit(at, at, text, (0, len(self._edits))))

    def remove(self, stmt: ast.stmt, *, only_one: bool = False) -> None:
        """The statement and its lines; `pass` stays where its block would be empty."""
        assert stmt.end_lineno is not None
        if only_one or not self.stands_alone(stmt):
            self.replace(stmt, "pass")
            return
        self.replace_span(self._line_start(stmt), self.line_end(stmt.end_lineno), "")

    def indent(self, first: ast.stmt, last: ast.stmt, by: str) -> None:
        """All lines from one statement to another further in; lines inside strings stay."""
        assert last.end_lineno is not None
        inside: set[int] = set()
        for node in ast.walk(ast.parse(self.source)):
            if (
                isinstance(node, (ast.Constant, ast.JoinedStr))
                and node.end_lineno is not None
                and node.end_lineno > node.lineno
                and (isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes)))
            ):
                inside.update(range(node.lineno + 1, node.end_lineno + 1))
        for number in range(first.lineno, last.end_lineno + 1):
            at = self._starts[number - 1]
            if number not in inside and self.source[at : self._starts[number]].strip():
                self._edits.append(_Edit(at, at, by, (1, 0)))

    def apply(self) -> str:
        """The new text. Of two changes to one stretch, the one that holds the other wins."""
        removed = [(e.start, e.end) for e in self._edits if e.end > e.start]

        def swallowed(edit: _Edit) -> bool:
            return any(
                start <= edit.start
                and edit.end <= end
                and (start, end) != (edit.start, edit.end)
                and not (edit.start == edit.end and edit.start in (start, end))
                for start, end in removed
            )

        parts: list[str] = []
        at = 0
        kept = [edit for edit in self._edits if not swallowed(edit)]
        for edit in sorted(kept, key=lambda e: (e.start, e.end, e.order)):
            parts.append(self.source[at : edit.start])
            parts.append(edit.text)
            at = max(at, edit.end)
        parts.append(self.source[at:])
        return "".join(parts)

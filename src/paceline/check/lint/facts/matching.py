"""`match` as the `if`s that it stands for, so that one reading does for both."""

import ast
from typing import TypeVar

from paceline.check.lint.facts.source import path_of


def as_branches(node: ast.Match) -> list[ast.stmt]:
    """The chain of `if` and `else` that chooses among the cases. Made once for each statement."""
    made: list[ast.stmt] | None = getattr(node, "branches", None)
    if made is None:
        made = []
        for case in reversed(node.cases):
            made = branch(node.subject, case, made)
        node.branches = made  # type: ignore[attr-defined]
    return made


def branch(subject: ast.expr, case: ast.match_case, others: list[ast.stmt]) -> list[ast.stmt]:
    """One case, and in its `else` those after it."""
    bound: list[ast.stmt] = []
    for one in ast.walk(case.pattern):
        if isinstance(one, ast.MatchAs | ast.MatchStar) and one.name is not None:
            target = ast.copy_location(ast.Name(one.name, ast.Store()), one)
            bound.append(in_place(ast.Assign([target], subject), one))
    test = condition(subject, case.pattern)
    if case.guard is not None:
        parts = [case.guard] if test is None else [test, case.guard]
        test = in_place(ast.BoolOp(ast.And(), parts), case.pattern)
    body = [*bound, *case.body]
    return body if test is None else [in_place(ast.If(test, body, others), case.pattern)]


def condition(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    """What a pattern asks of the subject; None where it takes everything."""
    if isinstance(pattern, ast.MatchAs):
        return None if pattern.pattern is None else condition(subject, pattern.pattern)
    if isinstance(pattern, ast.MatchValue):
        return in_place(ast.Compare(subject, [ast.Eq()], [pattern.value]), pattern)
    if isinstance(pattern, ast.MatchSingleton):
        value = in_place(ast.Constant(pattern.value), pattern)
        return in_place(ast.Compare(subject, [ast.Is()], [value]), pattern)
    if isinstance(pattern, ast.MatchOr):
        parts = [condition(subject, one) for one in pattern.patterns]
        known = [one for one in parts if one is not None]
        if len(known) < len(parts):
            return None
        return in_place(ast.BoolOp(ast.Or(), known), pattern)
    return subject  # its shape: whatever it depends on decides


Made = TypeVar("Made", bound=ast.AST)


def in_place(made: Made, pattern: ast.pattern) -> Made:
    """A node that no file holds, at the place of the pattern that it stands for."""
    made.path = path_of(pattern)  # type: ignore[attr-defined]
    return ast.copy_location(made, pattern)

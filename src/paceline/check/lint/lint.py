"""`lint`: what will go wrong in these files. They are handed over as bytes; nothing is opened."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.check.finding import Finding, Severity, finding_data, in_reading_order
from paceline.check.lint.across import (
    check_across,
    context_for,
    is_sharded_by_start,
    starts_in,
)
from paceline.check.lint.configs import (
    Config,
    Planned,
    check_config,
    check_planned,
    read_config,
)
from paceline.check.lint.configs import Unreadable as UnreadableConfig
from paceline.check.lint.configs.marked import NoParser
from paceline.check.lint.context import Context, context_from_launch, merged
from paceline.check.lint.imports import Files
from paceline.check.lint.program import Program, read_program
from paceline.check.lint.rules import RULES
from paceline.check.lint.secrets import check_secrets_in
from paceline.check.lint.source import Unreadable
from paceline.check.lint.suppress import apply_suppressions, suppressions_in


def lint_program(path: str, source: bytes | str, context: Context) -> list[Finding]:
    """Findings in one Python file.

    Raises:
        Unreadable: It is no Python program.
    """
    program = read_program(path, source)
    if program.launch is not None:
        context = merged(context, context_from_launch(program.launch))
    return in_reading_order(once_a_line(check(program, context)))


def check(program: Program, context: Context) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule(program, context)


def once_a_line(findings: Iterator[Finding]) -> list[Finding]:
    """One finding for each failure and line, though several calls lead there."""
    kept: dict[tuple[str, int | None], Finding] = {}
    for one in findings:
        kept.setdefault((one.id, one.where.line), one)
    return list(kept.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A file that could not be read as what it is."""

    path: str
    line: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.path}{f':{self.line}' if self.line else ''}: {self.what}"


@dataclass(frozen=True, slots=True)
class _Shield:
    """Keeps a rule that fails from ending the others; what it failed with is reported."""

    unread: list[Unread]
    without_parser: list[Unread]

    def over(
        self, path: str, rule: str, findings: Callable[[], Iterable[Finding]]
    ) -> list[Finding]:
        """What a rule finds; nothing where it fails."""
        try:
            return list(findings())
        except NoParser as error:
            self.without_parser.append(Unread(path=path, line=error.line, what=error.what))
        except Exception as error:  # noqa: BLE001, a mistake of ours: the other rules still answer
            what = f"the rule {rule} failed with {type(error).__name__}: {error}; please report it"
            self.unread.append(Unread(path=path, line=None, what=what))
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """What reading a set of files gave."""

    findings: list[Finding]
    """In the order of the files and lines; those that a comment answers are left out."""

    answered: list[Finding]
    """Those that a comment with a reason answers."""

    unread: list[Unread]
    kinds: Mapping[str, str]
    """Path -> what it was read as: `python`, `accelerate`, `shell` ..."""

    without_parser: list[Unread]
    """Shell commands that were not read: what reads them is not installed."""


def linted_data(
    linted: Linted, shown: Sequence[Finding], unread: Sequence[Unread]
) -> dict[str, Any]:
    """What `lint --json` prints.

    Args:
        unread: What could not be read, also of files that were never handed over.
    """
    return {
        "findings": [finding_data(each) for each in shown],
        "answered": [finding_data(each) for each in linted.answered],
        "unread": [{"path": each.path, "line": each.line, "what": each.what} for each in unread],
        "files": dict(linted.kinds),
    }


def lint(sources: Mapping[str, bytes], context: Context) -> list[Finding]:
    """Findings in these files, by path; files of no known kind give none."""
    return lint_files(sources, context).findings


def lint_files(
    sources: Mapping[str, bytes],
    context: Context,
    *,
    may_hold_secrets: Callable[[str], bool] = lambda path: False,
    planned: Callable[[str], Planned] = lambda path: None,
) -> Linted:
    """What lint finds, and what else reading the files gave. Nothing is raised for a broken file.

    Args:
        may_hold_secrets: Whether a path is of a file that git ignores. Asked where one is found.
        planned: Plans the job file at a path, which has no mistake by itself.
    """
    unread: list[Unread] = []
    programs: list[Program] = []
    configs: list[Config] = []
    texts: dict[str, str] = {}
    secrets: list[Finding] = []
    without_parser: list[Unread] = []
    files = Files({path: text for path, text in sources.items() if is_python(path, text)})
    for path, source in sources.items():
        if not source.strip():
            continue
        if b"\0" in source[:8192]:
            unread.append(Unread(path=path, line=None, what="a binary file"))
            continue
        text = source.decode(errors="replace").removeprefix("\ufeff")
        in_code = path.endswith(".ipynb") or is_python(path, source)
        here = list(check_secrets_in(path, text, in_code=in_code))
        try:
            if path.endswith(".ipynb"):  # its cells are no program: searched for secrets alone
                texts[path] = text
            elif is_python(path, source):
                programs.append(read_program(path, source, files))
                texts[path] = programs[-1].text
            else:
                texts[path] = text
                config = read_config(path, text)
                if config is not None:
                    configs.append(config)
                    here = [] if config.kind == "job" else here  # J013, which knows its `secrets`
        except Unreadable as error:
            unread.append(Unread(path=path, line=error.line, what=str(error)))
        except UnreadableConfig as error:
            kept = without_parser if isinstance(error, NoParser) else unread
            kept.append(Unread(path=path, line=error.line, what=error.what))
        secrets += here if here and not may_hold_secrets(path) else []
    shield = _Shield(unread, without_parser)
    findings = [*_findings(programs, configs, context, planned, shield), *secrets]
    trees = {one.path: one.tree for one in programs}
    given = [
        one
        for path, text in texts.items()
        for one in suppressions_in(path, text, _statements(trees[path]) if path in trees else ())
    ]
    stay, answered = apply_suppressions(findings, given)
    return Linted(
        findings=in_reading_order(stay),
        answered=in_reading_order(answered),
        unread=unread,
        without_parser=without_parser,
        kinds={one.path: "python" for one in programs}
        | {one.path: one.kind for one in configs}
        | {path: "notebook" for path in texts if path.endswith(".ipynb")},
    )


def _statements(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each statement; of one with a body, those of its head."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        body = getattr(node, "body", None)
        if isinstance(body, list):
            last = max(node.lineno, body[0].lineno - 1)
            heads = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
            ends = [one.end_lineno or 0 for one in heads if (one.end_lineno or 0) <= last]
            yield node.lineno, max(ends, default=node.lineno)
        else:
            yield node.lineno, node.end_lineno or node.lineno


def is_python(path: str, source: bytes) -> bool:
    """Whether a file is a Python program, by its name or its first line."""
    return path.endswith((".py", ".pyw")) or (
        "." not in path.rsplit("/", 1)[-1]
        and source[:2] == b"#!"
        and b"python" in source.split(b"\n", 1)[0]
    )


def _findings(
    programs: list[Program],
    configs: list[Config],
    context: Context,
    planned: Callable[[str], Planned],
    shield: _Shield,
) -> Iterator[Finding]:
    """Findings of each file in its own context, and of all together; the worst for a failure and
    line.

    JSON may stand in one line: there, each that says something else is kept.
    """
    starts = starts_in(configs, context)
    kept: dict[tuple[str, str, int | None, str], Finding] = {}
    levels = list(Severity)

    def all_findings() -> Iterator[Finding]:
        for program in programs:
            own = context_for(program.path, context, starts, configs)
            if program.launch is not None:
                own = merged(own, context_from_launch(program.launch))
            if is_sharded_by_start(program.path, starts, configs):
                program.shard_prepared()
            for rule in RULES:
                yield from shield.over(program.path, rule.__name__, partial(rule, program, own))
        for config in configs:
            path = config.path
            own = context_for(path, context, starts, configs)
            its_own = shield.over(path, config.kind, partial(check_config, config, own))
            yield from its_own
            if config.kind == "job" and not its_own:
                yield from check_planned(path, config.document, planned(path))
        first = configs[0].path if configs else programs[0].path if programs else ""
        across = partial(check_across, configs, programs, context)
        yield from shield.over(first, "check_across", across)

    for one in all_findings():
        what = one.what if one.where.path.endswith(".json") else ""
        key = (one.where.path, one.id, one.where.line, what)
        if key not in kept or levels.index(one.severity) < levels.index(kept[key].severity):
            kept[key] = one
    yield from kept.values()

"""`lint`: what will go wrong in these files. They are handed over as bytes; nothing is opened."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from posixpath import commonprefix
from typing import Any

from paceline.check.finding import Finding, Severity, finding_data, in_reading_order
from paceline.check.lint.across import (
    Start,
    context_for,
    names_file,
    starts_in,
    variables_in,
)
from paceline.check.lint.configs import Config, Planned, check_config, check_planned, read_config
from paceline.check.lint.configs.marked import NoParser
from paceline.check.lint.configs.say import findings as findings_of
from paceline.check.lint.configs.variables import check_variables
from paceline.check.lint.context import Context, merged
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.program import read_program
from paceline.check.lint.facts.source import (
    Unreadable,
    check_syntax,
    decoded,
    is_about_training,
    is_test,
)
from paceline.check.lint.judged import Judged, Unread
from paceline.check.lint.memory import Memory
from paceline.check.lint.rules import RULES
from paceline.check.lint.secrets import LOOKS_REAL, SECRET, check_secrets_in
from paceline.check.lint.stated import context_from_launch
from paceline.check.lint.suppress import apply_suppressions, suppressions_in


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

    not_planned: list[Unread]
    """Job files whose plan was not judged, and why."""


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
        "not_planned": [{"path": each.path, "what": each.what} for each in linted.not_planned],
        "files": dict(linted.kinds),
    }


def lint(sources: Mapping[str, bytes], context: Context) -> list[Finding]:
    """Findings in these files, by path; files of no known kind give none."""
    return lint_files(sources, context).findings


@dataclass(frozen=True, slots=True)
class Reading:
    """What the files of one call share, and how each of its programs is judged."""

    files: Files
    configs: Sequence[Config]
    starts: Sequence[Start]
    context: Context

    def judge(self, path: str) -> Judged:
        """Findings in one Python program, by itself and beside the configurations."""
        self.files.asked.clear()
        judged = self._judged(path)
        judged.path, judged.read = path, sorted(self.files.asked | {path})
        return judged

    def _judged(self, path: str) -> Judged:
        judged = Judged()
        source = self.files.texts[path]
        text = source.decode(errors="replace") if isinstance(source, bytes) else source
        secrets = partial(check_secrets_in, path, text.removeprefix("\ufeff"), in_code=True)
        judged.over(path, "check_secrets_in", secrets)
        is_started = any(names_file(one.launch, path) for one in self.starts)
        try:
            if not is_started and not is_about_training(source):
                check_syntax(decoded(source) if isinstance(source, bytes) else source)
                return judged
            program = read_program(path, source, self.files)
        except Unreadable as error:
            judged.unread.append(Unread(path=path, line=error.line, what=str(error)))
            judged.broken.append(path)
            return judged
        own = context_for(path, self.context, self.starts, self.configs)
        if program.launch is not None:
            own = merged(own, context_from_launch(program.launch))
        for rule in RULES:
            judged.over(path, rule.__name__, partial(rule, program, own))
        variables = partial(check_variables, variables_in(program), own)
        judged.over(path, "check_variables", lambda: findings_of(path, variables()))
        if "paceline:" in program.text.lower():
            judged.answers += suppressions_in(path, program.text, _statements(program.tree))
        return judged


Judge = Callable[[Callable[[str], Judged], Sequence[str]], Iterable[Judged]]


def lint_files(
    sources: Mapping[str, bytes],
    context: Context,
    *,
    may_hold_secrets: Callable[[str], bool] = lambda path: False,
    planned: Callable[[str], Planned] = lambda path: None,
    judge_all: Judge = map,
    memory: Memory | None = None,
) -> Linted:
    """What lint finds, and what else reading the files gave. Nothing is raised for a broken file.

    Args:
        may_hold_secrets: Whether a path is of a file that git ignores. Asked where one is found.
        planned: Plans the job file at a path, which has no mistake by itself.
        judge_all: Calls a function with each path, as `map` does; in several processes, perhaps.
        memory: What was found in the same files before. It holds what is found now afterwards.
    """
    judged = Judged()
    kinds: dict[str, str] = {}
    configs: list[Config] = []
    programs: list[str] = []
    memory = memory or Memory()
    memory.begin(sources)
    for path, source in sources.items():
        if not source.strip():
            continue
        if b"\0" in source[:8192]:
            judged.unread.append(Unread(path=path, line=None, what="a binary file"))
            continue
        if is_python(path, source):
            kinds[path] = "python"
            programs.append(path)
            continue
        if path.endswith(".ipynb"):  # its cells are no program: searched for secrets alone
            kinds[path] = "notebook"
        seen, config = memory.of(path), None
        if seen is None:
            seen, config = _look(path, source)
            if config is not None:
                configs.append(config)
            else:
                memory.keep(seen)
        judged.take(seen)
    kinds |= {config.path: config.kind for config in configs}
    starts = starts_in(configs, context)
    files = Files({path: sources[path] for path in programs})
    reading = Reading(files, configs, starts, context)
    memory.surround(context, programs, [config.path for config in configs])
    kept = {path: memory.of(path, is_program=True) for path in programs}
    for seen in filter(None, kept.values()):
        judged.take(seen)
    for one in judge_all(reading.judge, [path for path in programs if kept[path] is None]):
        judged.take(one)
        memory.keep(one, is_program=True)
    not_planned: list[Unread] = []
    for config in configs:
        path = config.path
        own = context_for(path, context, starts, configs)
        found = judged.over(path, config.kind, partial(check_config, config, own))
        if config.kind == "job" and not found:
            plan = planned(path)
            judged.findings += findings_of(path, check_planned(config.document, plan))
            if isinstance(plan, str):
                not_planned.append(Unread(path=path, line=None, what=plan))
    broken = set(judged.broken)
    root = commonprefix([f"{path.rpartition('/')[0]}/" for path in sources]).rpartition("/")[0]
    worst = _worst(_in_test(one, root) for one in judged.findings)
    findings = _shown_secrets(worst, may_hold_secrets)
    stay, answered = apply_suppressions(findings, judged.answers)
    return Linted(
        findings=in_reading_order(stay),
        answered=in_reading_order(answered),
        # Tests hold files that are broken on purpose.
        unread=[one for one in judged.unread if not is_test(one.path.removeprefix(root))],
        without_parser=judged.without_parser,
        not_planned=not_planned,
        kinds={path: kinds[path] for path in sources if path in kinds and path not in broken},
    )


def _look(path: str, source: bytes) -> tuple[Judged, Config | None]:
    """What a text shows that is no program, and the configuration that it is, if it is one."""
    text = source.decode(errors="replace").removeprefix("\ufeff")
    seen, config = Judged(path=path, read=[path]), None
    is_notebook = path.endswith(".ipynb")
    if not is_notebook:
        try:
            config = read_config(path, text)
        except Unreadable as error:
            kept = seen.without_parser if isinstance(error, NoParser) else seen.unread
            kept.append(Unread(path=path, line=error.line, what=str(error)))
    if config is None or config.kind != "job":  # J013, which knows its `secrets`
        seen.findings += check_secrets_in(path, text, in_code=is_notebook)
    seen.answers += suppressions_in(path, text)
    return seen, config


def _in_test(finding: Finding, root: str) -> Finding:
    """A finding in a test, which calls things as training does not; what only looks like a secret
    in an example as well. A secret of an issuer's form is one anywhere.

    Args:
        root: The folder of all files: what is in it was asked for, whatever it is called.
    """
    path, looks_real = finding.where.path.removeprefix(root), LOOKS_REAL in finding.what
    is_issued = finding.id == SECRET and not looks_real
    if is_issued or not (is_test(path) or (looks_real and _OF_EXAMPLES.search(path))):
        return finding
    return replace(finding, severity=Severity.INFO)


_OF_EXAMPLES = re.compile(r"(^|/)(examples?|samples?|demos?|docs?|tutorials?)/")


def _shown_secrets(
    findings: Iterable[Finding], may_hold_secrets: Callable[[str], bool]
) -> list[Finding]:
    """Without the secrets of files that may hold some."""
    findings = list(findings)
    holders = dict.fromkeys(one.where.path for one in findings if one.id == SECRET)
    passed = {path for path in holders if may_hold_secrets(path)}
    return [one for one in findings if one.id != SECRET or one.where.path not in passed]


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


def _worst(findings: Iterable[Finding]) -> list[Finding]:
    """The worst finding for a failure and line.

    JSON may stand in one line, and a line of a job file has several keys: there, each that says
    something else is kept.
    """
    kept: dict[tuple[str, str, int | None, str], Finding] = {}
    for one in sorted(findings, key=lambda one: list(Severity).index(one.severity)):
        is_each = one.where.path.endswith(".json") or one.id == "job-file"
        kept.setdefault((one.where.path, one.id, one.where.line, one.what if is_each else ""), one)
    return list(kept.values())

"""`paceline lint`: what will go wrong in these programs and configurations."""

import contextlib
import difflib
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option

if TYPE_CHECKING:
    from paceline.check.finding import Finding
    from paceline.check.lint.context import Context
    from paceline.check.lint.fix import Fixed
    from paceline.check.lint.judged import Unread
    from paceline.check.lint.lint import Linted
    from paceline.record.source_files import Sources


@click.command()
@click.argument(
    "paths",
    metavar="PATH...",
    nargs=-1,
    required=True,
    type=PathName(path_type=Path, readable=False),  # one that may not be read is said, as others
)
@click.option("--gpu", metavar="NAME", help="Accelerator they run on: V100, A100, H100-SXM.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines of the job.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Accelerators of a machine.")
@click.option(
    "--context",
    "context_file",
    metavar="FILE",
    type=PathName(path_type=Path, dir_okay=False),
    help='JSON with more facts: {"launch": "torchrun ...", "devices": 8, "nodes": 8}.',
)
@click.option(
    "--severity",
    type=click.Choice(["error", "warning", "info"]),
    help="Show findings from this level on. Default: warning; info (hints) with --json, --sarif.",
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="ID",
    help="Leave out findings of this id. May be given again.",
)
@click.option("--strict", is_flag=True, help="End with 1 when there are warnings, too.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print SARIF 2.1.0.")
@click.option(
    "--fix", "shows_fix", is_flag=True, help="Print the changes that need no judgement, as a diff."
)
@click.option(
    "--write",
    "writes",
    is_flag=True,
    help="With --fix: write them into the files; FILE.orig keeps what it was.",
)
@click.option(
    "--no-cache",
    "without_cache",
    is_flag=True,
    help="Judge every file anew; what was found in unchanged files of a folder is kept otherwise.",
)
@json_option
def command(
    paths: tuple[Path, ...],
    gpu: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    context_file: Path | None,
    severity: str | None,
    ignored: tuple[str, ...],
    strict: bool,
    as_sarif: bool,
    shows_fix: bool,
    writes: bool,
    without_cache: bool,
    as_json: bool,
) -> int:
    """Find faults in training programs and their configurations, before they run.

    PATH is a file or a folder. It reads Python programs (PyTorch, Accelerate, Trainer, Lightning,
    DeepSpeed), shell and batch scripts, Accelerate's YAML, DeepSpeed's JSON, Kubernetes manifests,
    NeMo's YAML, environment files, Dockerfiles, and Paceline's job file and plan: each by itself,
    and all of them together. A job file that names its cluster is planned; nothing is run. Keys and
    passwords are found in all of these and in notebooks, unless git ignores the file.

    A comment `# paceline: ignore[id] reason` on the line suppresses a finding; `paceline explain
    ID` explains why it matters.

    \b
    Examples:
      paceline lint train.py
      paceline lint . --gpu V100 --nodes 2 --gpus-per-node 8
      paceline lint train.py launch.sh ds_config.json --strict
      paceline lint src --sarif > lint.sarif
      paceline lint train.py --fix | git apply

    \b
    Exit codes:
      0  no errors
      1  errors, or with --strict warnings
      2  a path does not exist, or a file cannot be parsed
    """
    from paceline.check.finding import Severity
    from paceline.check.lint.judged import Unread
    from paceline.check.lint.lint import lint_files
    from paceline.check.lint.memory import Memory, memory_as_bytes, memory_of_bytes
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.launch.in_processes import map_in_processes
    from paceline.launch.plannable import plan_of_file
    from paceline.record.lint_memory import memory_file, rules_version
    from paceline.record.source_files import is_git_ignored, read_sources
    from paceline.record.user_cache import read_cached, write_cached
    from paceline.units import counted

    _check_options(as_json, as_sarif, shows_fix, writes)
    gc.set_threshold(200_000, 20, 100)  # trees are few, large and short-lived: a third of the time
    left_out = _left_out(ignored)
    sources = read_sources(paths)
    context = _context(gpu, nodes, gpus_per_node, context_file)
    file = None if without_cache else memory_file(paths, repr(context))
    version = rules_version() if file is not None else ""
    memory = memory_of_bytes(read_cached(file), version) if file is not None else Memory()
    linted = lint_files(
        sources.files,
        context,
        may_hold_secrets=lambda name: is_git_ignored(sources.paths[name]),
        planned=lambda name: plan_of_file(sources.paths[name]),
        judge_all=map_in_processes,
        memory=memory,
    )
    if file is not None and memory.has_changed:
        with contextlib.suppress(OSError):
            write_cached(file, memory_as_bytes(memory, version))
    unread = [Unread(path=path, line=None, what=what) for path, what in sources.troubles]
    named = set(sources.named)
    unread += [*linted.unread, *(one for one in linted.without_parser if one.path in named)]
    passed_over = [one for one in linted.without_parser if one.path not in named]
    rank = list(Severity)
    findings = [one for one in linted.findings if one.id not in left_out]
    lowest = Severity(severity or ("info" if as_json or as_sarif else "warning"))
    shown = [one for one in findings if rank.index(one.severity) <= rank.index(lowest)]
    texts = {path: _text(data) for path, data in sources.files.items()}
    with reader_may_leave():
        _say_unread(unread, linted, sources)
        if passed_over:
            click.echo(
                f"{counted(len(passed_over), 'file')} with shell commands not linted: "
                f"{passed_over[0].what}",
                err=True,
            )
        if shows_fix:
            _print_fixes(findings, texts, sources, writes)  # hints as well
        else:
            _print(linted, shown, texts, unread, as_json, as_sarif, _whole(texts, sources))
    if unread:
        return 2
    ends = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return 1 if any(one.severity in ends for one in findings) else 0


def _say_unread(unread: "list[Unread]", linted: "Linted", sources: "Sources") -> None:
    """To standard error: what could not be read or planned, and named files of no known kind."""
    for each in unread:
        click.echo(f"{each} (not linted)", err=True)
    for each in linted.not_planned:
        click.echo(f"{each.path}: not planned: {each.what}; `paceline plan` judges it", err=True)
    said = {one.path for one in unread} | set(linted.kinds)
    for path in sources.named:
        if path not in said:
            click.echo(
                f"{path}: no kind of file that lint knows (searched for secrets only)", err=True
            )


def _check_options(as_json: bool, as_sarif: bool, shows_fix: bool, writes: bool) -> None:
    if as_json + as_sarif + shows_fix > 1:
        raise click.UsageError("give one of --json, --sarif and --fix")
    if writes and not shows_fix:
        raise click.UsageError("--write needs --fix")


def _left_out(ignored: tuple[str, ...]) -> set[str]:
    """The ids that --ignore names.

    Raises:
        JobError: No failure is called so.
    """
    from paceline.check.lint.suppress import ids_of
    from paceline.errors import JobError

    found: set[str] = set()
    for name in ignored:
        ids = ids_of(name)
        if not ids:
            raise JobError.of(
                code="V021",
                what=f"no finding is called {name}",
                where="--ignore",
                fix="`paceline explain --list` has all ids",
            )
        found |= ids
    return found


def _context(
    gpu: str | None, nodes: int | None, gpus_per_node: int | None, file: Path | None
) -> "Context":
    """The facts of the file, and those of the options over them.

    Raises:
        JobError: The file cannot be read, or is no JSON object (`V022`).
    """
    from paceline.check.lint.stated import context_from_facts, known_gpus, knows_gpu, unread_facts
    from paceline.errors import JobError

    facts: dict[str, Any] = {}
    if file is not None:
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(read, dict):
                raise ValueError("not an object")
        except (OSError, ValueError, RecursionError) as error:
            raise JobError.of(
                code="V022",
                what=f"{file} is no JSON object with facts: {error}",
                where="--context",
                fix='{"nodes": 2, "gpus_per_node": 8, "gpu": "H100-SXM"}',
            ) from None
        facts.update(read)
    for what in unread_facts(facts):
        click.echo(f"--context: {what}: passed over", err=True)
    if gpu is not None and not knows_gpu(gpu):
        near = difflib.get_close_matches(gpu.upper(), known_gpus(), n=3, cutoff=0.3)
        names = ", ".join(near or known_gpus()[:6])
        click.echo(f"--gpu: no accelerator is called {gpu} ({names}?): passed over", err=True)
        gpu = None
    given = {"gpu": gpu, "nodes": nodes, "gpus_per_node": gpus_per_node}
    facts.update({name: value for name, value in given.items() if value is not None})
    return context_from_facts(facts)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _print(
    linted: "Linted",
    shown: "list[Finding]",
    texts: Mapping[str, str],
    unread: list[Any],
    as_json: bool,
    as_sarif: bool,
    whole: Mapping[str, str],
) -> None:
    from paceline.check.lint.fix import fix_files
    from paceline.check.lint.lint import linted_data
    from paceline.check.lint.sarif import sarif
    from paceline.cli.screen import show
    from paceline.report.lint_text import finding_lines, summary_line

    if as_sarif:
        click.echo(json.dumps(sarif(shown, linted.answered, unread), indent=2))
        return
    if as_json:
        click.echo(json.dumps(linted_data(linted, shown, unread), indent=2))
        return
    for one in shown:
        show("\n".join(finding_lines(one, texts)) + "\n")
    num_fixed = sum(len(each.findings) for each in fix_files(shown, whole))
    show(summary_line(linted, shown, num_fixed=num_fixed))


def _whole(texts: Mapping[str, str], sources: "Sources") -> dict[str, str]:
    """Files that are UTF-8: another would not be written back as it was."""
    return {path: text for path, text in texts.items() if text.encode() == sources.files[path]}


def _print_fixes(
    shown: "list[Finding]", texts: Mapping[str, str], sources: "Sources", writes: bool
) -> None:
    from paceline.check.lint.fix import fix_files

    fixed = fix_files(shown, _whole(texts, sources))
    for each in fixed:
        click.echo(each.diff, nl=False)
        if writes:
            _write(each, sources)
    number = sum(len(each.findings) for each in fixed)
    done = "nothing to write" if not number else "written" if writes else "not written: --write"
    click.echo(f"{number} of {len(shown)} findings have such a change ({done})", err=True)


def _write(fixed: "Fixed", sources: "Sources") -> None:
    from paceline.errors import JobError
    from paceline.record.rewrite import rewrite

    path = sources.paths[fixed.path]
    try:
        kept = rewrite(path, fixed.after.encode())
        click.echo(f"{fixed.path}: changed; {kept.name} keeps what it was", err=True)
    except OSError as error:
        raise JobError.of(
            code="V023",
            what=f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            where="--fix --write",
            fix="make the file writable, or apply the printed diff elsewhere",
        ) from None

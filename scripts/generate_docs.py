"""Write the reference pages that are made from the code, or say which are out of date.

python scripts/generate_docs.py            write them
python scripts/generate_docs.py --check    exit 1 when one is out of date
"""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import click
import yaml
from click.testing import CliRunner

from paceline import cli
from paceline.catalog.code import page
from paceline.catalog.failure import Failure, load_benign_lines, load_failures
from paceline.catalog.symptom import load_symptoms
from paceline.cli.verbs import GROUPS
from paceline.errors import EXIT_1, EXIT_CODES
from paceline.job.job import JobSpec
from paceline.job.load import job_schema
from paceline.job.section import section_in
from paceline.record import events, metric_names, metrics, run_row

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def job_file() -> str:
    """Every section and field of the job file: type, default, help."""
    lines = [
        "# The job file\n",
        "One YAML file says what to train, on what, where and how. Everything left out is decided,",
        "and `paceline plan` prints each decision with its reason. `paceline init` writes a",
        "commented file to start from; `paceline schema` prints the JSON Schema for editors.\n",
        "Sizes take units: `7B` parameters, `80 GiB` (2^30) or `80 GB` (10^9), `400Gb/s` (bits) or",
        "`50GB/s` (bytes), `30m`. Order of precedence: defaults, the file, `--set key.key=value`.",
        "Unknown keys are errors that name the nearest known one.\n",
        "This page is generated from `paceline.job`.\n",
    ]
    schema = job_schema()
    lines += ["## Top level\n", *_table(JobSpec, schema, "JobSpec")]
    for path, section in _sections(JobSpec, ()):
        lines.append(f"\n## `{'.'.join(path)}`\n")
        lines.append(f"{' '.join((section.__doc__ or '').split())}\n")
        lines += _table(section, schema, section.__name__)
    return "\n".join(lines) + "\n"


def _sections(section: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for field in fields(section):
        inner = section_in(field.type)
        if inner is not None:
            yield (*path, field.name), inner
            yield from _sections(inner, (*path, field.name))


def _table(section: Any, schema: dict[str, Any], name: str) -> list[str]:
    rows = ["| field | type | default | what it is |", "| --- | --- | --- | --- |"]
    properties = schema["properties"] if name == "JobSpec" else schema["$defs"][name]["properties"]
    required = schema if name == "JobSpec" else schema["$defs"][name]
    for field in fields(section):
        info = section.__pydantic_fields__[field.name]
        told = properties[field.name]
        if field.name in required.get("required", ()):
            default = "required"
        elif section_in(field.type) is not None:
            default = "its own defaults" if info.default_factory is not None else "none"
        else:
            value = info.get_default(call_default_factory=True)
            is_shown = info.default_factory is not None or "default" in told
            default = f"`{_yaml(value)}`" if is_shown and value is not None else "none"
        text = " ".join((info.description or "").split())
        rows.append(f"| `{field.name}` | {_type(told)} | {default} | {text} |")
    return rows


def _type(told: dict[str, Any]) -> str:
    if "$ref" in told:
        return "section"
    if "anyOf" in told:
        examples = told.get("examples")
        if examples:
            return f"number, or text such as `{examples[0]}`"
        kinds = [_type(option) for option in told["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in told:
        return ", ".join(f"`{value}`" for value in told["enum"])
    if "const" in told:
        return f"`{told['const']}`"
    if told.get("type") == "array":
        parts = told.get("prefixItems")
        return (
            f"list of {len(parts)}: {_type(parts[0])}"
            if parts
            else (f"list of {_type(told['items'])}")
        )
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "yes/no"}
    text = names.get(told.get("type", ""), "value")
    limits = [
        f"{word} {told[key]}"
        for key, word in (
            ("exclusiveMinimum", "above"),
            ("minimum", "from"),
            ("exclusiveMaximum", "below"),
            ("maximum", "to"),
        )
        if key in told
    ]
    return f"{text} {', '.join(limits)}".strip()


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


def event_schema() -> str:
    """Every event of `events.jsonl`."""
    lines = [
        "# Events\n",
        "A run's `events.jsonl` has one JSON object a line, in order. Every line has `event` (one",
        "of the names below), `at` (seconds since 1970, UTC) and `generation` (how many times the",
        "workers have been started, from 1). Numbers in fields that end in `_s` are measured",
        "seconds. This page is generated from `paceline.record.events`.\n",
    ]
    texts = _field_texts(Path(events.__file__))
    for event in sorted(get_args(events.AnyEvent), key=lambda each: [*texts].index(each.__name__)):
        lines += _fields_of(event.__name__, event.__doc__ or "", texts[event.__name__])
    return "\n".join(lines) + "\n"


def metric_schema() -> str:
    """Every field of `metrics.jsonl`."""
    module = metrics.__doc__ or ""
    about = module.partition("docs/reference")[0].strip()
    lines = [
        "# Metrics\n",
        f"{about}\n",
        "This page is generated from `paceline.record.metrics`.\n",
    ]
    texts = _field_texts(Path(metrics.__file__))
    doc = metrics.StepMetrics.__doc__ or ""
    lines += _fields_of("StepMetrics", doc, texts["StepMetrics"])
    lines += [
        "## Names\n",
        "What the page, alerts, sinks and comparisons call each number. A number that a program",
        "logs keeps the name that it was given.\n",
        "| name | unit | what it is | field of a line |",
        "| --- | --- | --- | --- |",
    ]
    for row in metric_names.METRICS.values():
        field = f"`{row.field}`" if row.field else "-"
        lines.append(f"| `{row.name}` | {row.unit or '-'} | {row.text} | {field} |")
    return "\n".join(lines) + "\n"


def run_fields() -> str:
    """Every field of a run's row."""
    lines = [
        "# Fields of a run\n",
        "What `paceline runs` lists, filters (`--where`) and sorts by, and prints with `--json`:",
        "[the guide](../guides/runs.md). A name with a dot is a setting of the job, such as",
        "`train.learning_rate` ([all of them](job-file.md)). This page is generated from",
        "`paceline.record.run_row`.\n",
    ]
    texts = _field_texts(Path(run_row.__file__))
    lines += _fields_of("RunRow", run_row.RunRow.__doc__ or "", texts["RunRow"])
    return "\n".join(lines) + "\n"


def _fields_of(name: str, doc: str, texts: list[tuple[str, str, str]]) -> list[str]:
    lines = [f"## {name}\n", f"{' '.join(doc.split())}\n"]
    if texts:
        lines += ["| field | type | what it is |", "| --- | --- | --- |"]
        lines += [f"| `{field}` | {kind} | {text} |" for field, kind, text in texts]
        lines.append("")
    return lines


def _field_texts(source: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Class -> (field, type, the text under it), read from the source."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for node in ast.parse(source.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        rows: list[tuple[str, str, str]] = []
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                kind = ast.unparse(statement.annotation).replace("|", "or")
                rows.append((statement.target.id, kind, ""))
            elif isinstance(statement, ast.Expr) and rows and not rows[-1][2]:
                value = statement.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    rows[-1] = (*rows[-1][:2], " ".join(value.value.split()))
        found[node.name] = rows
    return found


def command_line() -> str:
    """What holds for every verb, `paceline --help`, and where each verb's help is."""
    _, start = next(_helps())
    lines = [
        "# The command line\n",
        "Answers go to standard output, messages to standard error; `run` prints its progress",
        "there too, unless `--json` is given. `paceline help run` is `paceline run --help`.",
        "These pages are generated from `--help`.\n",
        *_heads("for", "verbs"),
        *(
            f"| [{title.lower()}]({_page_of(title)}) | {', '.join(map(_verb_link, verbs))} |"
            for title, verbs in GROUPS.items()
        ),
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
        "\nCtrl-C once stops a run at the next step boundary with a checkpoint, twice at once.",
        "Exit code 1 of each command:\n",
        "| command | exit code 1 means |",
        "| --- | --- |",
        *(f"| `{command}` | {meaning} |" for command, meaning in EXIT_1.items()),
        f"\n## paceline\n\n```text\n{start}\n```",
    ]
    return _lines(lines)


def command_page(title: str) -> str:
    """`--help` of the verbs of one group."""
    lines = [f"# The command line: {title.lower()}\n", "[All verbs](../cli.md), with exit codes."]
    for words, text in _helps():
        if words and words[0] in GROUPS[title]:
            heading = "###" if len(words) > 1 else "##"
            lines.append(f"\n{heading} {' '.join(('paceline', *words))}\n\n```text\n{text}\n```")
    return _lines(lines)


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"


def _page_of(title: str) -> str:
    return f"cli/{title.lower().replace(' ', '-')}.md"


def _verb_link(verb: str) -> str:
    title = next(title for title, verbs in GROUPS.items() if verb in verbs)
    return f"[`{verb}`]({_page_of(title)}#paceline-{verb})"


def man_page() -> str:
    """`man paceline`: the same help, in man's own language."""
    lines = [
        '.TH PACELINE 1 "" "" "User commands"',
        ".SH NAME",
        "paceline \\- plan, prove and run distributed training",
        ".SH SYNOPSIS",
        ".B paceline\n[OPTIONS] COMMAND [ARGS]...",
    ]
    for words, text in _helps():
        title = " ".join(words) or "description"
        lines += [f'.SH "{title.upper()}"', ".in 0", ".nf", *map(_roff, text.splitlines()), ".fi"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _roff(line: str) -> str:
    """A line that is shown as it is: no command of roff's, and hyphens that can be copied.

    >>> _roff(".x a-b"), _roff("a\\\\b")
    ('\\\\&.x a\\\\-b', 'a\\\\eb')
    """
    escaped = line.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _helps(
    command: click.Command = cli.cli, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The words of every command, and its help as a terminal of 80 columns shows it."""
    runner = CliRunner(env={"COLUMNS": "80"})
    yield words, runner.invoke(cli.cli, [*words, "--help"], prog_name="paceline").stdout.rstrip()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for part in command.list_commands(context):
            inner = command.get_command(context, part)
            assert inner is not None
            yield from _helps(inner, (*words, part))


def failure_index() -> str:
    """Every failure by category, with a link to its text."""
    lines = [
        "# Failures\n",
        "Ways distributed training goes wrong that `paceline lint`, `diagnose` and `preflight`",
        "know. `paceline explain ID` prints the same text. Patterns and texts are in",
        "`src/paceline/catalog/failures/*.toml` and, of what only a rule of `lint` finds, in",
        "`src/paceline/check/lint/rules/*.toml`; these pages are generated from them.",
    ]
    for category, failures in failures_by_category().items():
        lines += ["", f"## {category.capitalize()}", "", *_heads("id", "what", "effect")]
        lines += [f"| {_link(one.id)} | {_cell(one.title)} | {one.effect} |" for one in failures]
    lines += ["", "## Published names", "", *_heads("name", "is")]
    published = sorted((name, one.id) for one in load_failures().values() for name in one.published)
    lines += [f"| {name} | {_link(one)} |" for name, one in published]
    lines += ["", "## One symptom, several causes", ""]
    lines += ["What `paceline diagnose` says as possible where a log names no cause.", ""]
    lines += _heads("what is seen", "may be, the likeliest first", "what decides")
    lines += [
        f"| {_cell(symptom.title)} | {_link(one.id)} | {_cell(one.check)} |"
        for symptom in load_symptoms().values()
        for one in symptom.causes
    ]
    lines += ["", "## Lines that look bad and are not", ""]
    lines += _heads("id", "line", "why", "when it matters")
    lines += [
        f"| {line.id} | `{_cell(line.shows[0])}` | {_cell(line.why)} | {_cell(line.matters_when)} |"
        for line in load_benign_lines()
    ]
    return "\n".join(lines) + "\n"


def failures_by_category() -> dict[str, list[Failure]]:
    """The failures of each file of the catalog."""
    known = load_failures().values()
    return {name: list(failures) for name, failures in groupby(known, lambda one: one.category)}


def failure_page(category: str) -> str:
    """Every failure of a category: why, how it shows, the fix, what it is not, and the sources."""
    lines = [f"# Failures: {category}", "", "[All failures](../failures.md)"]
    for failure in failures_by_category()[category]:
        about = f"{failure.effect}; {', '.join(failure.frameworks) or 'any framework'}"
        if failure.published:
            about += f"; published as {', '.join(f'`{name}`' for name in failure.published)}"
        lines += ["", f"## {failure.id}", "", f"**{_plain(failure.title)}** ({about})"]
        lines += ["", _linked(failure.why, failure)]
        if failure.shows:
            lines += ["", "How it shows:", "", "```text", *failure.shows, "```"]
        lines += ["", f"**Fix:** {_linked(failure.fix, failure)}"]
        if failure.not_to_confuse:
            lines += [
                "",
                f"**Not to be confused with:** {_linked(failure.not_to_confuse, failure)}",
            ]
        lines += ["", f"Sources: {', '.join(map(_source, failure.sources))}"]
    return "\n".join(lines) + "\n"


def _heads(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]


def _link(id: str, folder: str = "failures/") -> str:
    return f"[{id}]({folder}{load_failures()[id].category}.md#{id.lower()})"


def _linked(text: str, failure: Failure) -> str:
    """Text in which the ids of other failures lead to them. Words alone, such as `uncorrectable`,
    are no ids."""
    others = load_failures().keys() - {failure.id}
    return re.sub(
        r"(?<![\w/.-])[a-z0-9]+(-[a-z0-9]+)+(?![\w/.-]*\w)",
        lambda found: _link(found[0], "") if found[0] in others else found[0],
        _plain(text),
    )


def _plain(text: str) -> str:
    """The text with the signs that Markdown would take for its own kept as they are."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _source(source: str) -> str:
    thread = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", source)
    return f"[{source}](https://github.com/{thread[1]}/issues/{thread[2]})" if thread else source


def job_schema_file() -> str:
    """What `paceline schema` prints; the wheel has it as `paceline/job.schema.json`."""
    return json.dumps(job_schema(), indent=2) + "\n"


PAGES = {
    "job-file.md": job_file,
    "job.schema.json": job_schema_file,
    "events.md": event_schema,
    "metrics.md": metric_schema,
    "run-fields.md": run_fields,
    "cli.md": command_line,
    **{_page_of(title): partial(command_page, title) for title in GROUPS},
    "paceline.1": man_page,
    "codes.md": partial(page, "codes.md"),
    "topics.md": partial(page, "topics.md"),
    "failures.md": failure_index,
    **{f"failures/{name}.md": partial(failure_page, name) for name in failures_by_category()},
}


def main() -> None:
    """Write or check every page."""
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    for path in (*REFERENCE.glob("failures/*.md"), *REFERENCE.glob("cli/*.md")):
        name = path.relative_to(REFERENCE).as_posix()
        if name not in PAGES:
            stale.append(name)
            if "--check" not in sys.argv:
                path.unlink()
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/generate_docs.py")
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    main()

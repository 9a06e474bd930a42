"""`paceline adapt`: a single-device training script in its distributed form."""

import ast
import difflib
import io
import json
import shlex
import shutil
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option

if TYPE_CHECKING:
    from paceline.adapt import Adapted
    from paceline.errors import JobError

_TARGETS = ("ddp", "fsdp2", "accelerate", "paceline")
_MAX_BYTES = 5_000_000
"""A guess at what no training script reaches; a data file named by mistake does."""

_REFUSED = "A002"
"""Its page says what is refused, and what to do instead."""

_LEFT = 1
"""Exit code where something is left to a person; `paceline.errors.EXIT_CODES` has its meaning."""


@click.command()
@click.argument("script", type=PathName(path_type=Path))
@click.option("--to", "target", type=click.Choice(_TARGETS), required=True, help="What to use.")
@click.option("--write", is_flag=True, help="Change SCRIPT itself; SCRIPT.orig keeps what it was.")
@click.option(
    "--out", type=PathName(path_type=Path, dir_okay=False), help="Write into this file instead."
)
@json_option
def command(script: Path, target: str, write: bool, out: Path | None, as_json: bool) -> None:
    """Rewrite SCRIPT, written for one device, to run on many; shown as a diff.

    The global batch, the learning rate and the files it saves stay as they were. What could only be
    guessed is not changed: it is listed with its line, and why. Without --write or --out nothing is
    written.

    \b
    Exit codes:
      0  adapted, or it has this form already
      1  adapted, and something is left to you
      2  refused, or not readable: nothing is written

    \b
    Examples:
      paceline adapt train.py --to ddp
      paceline adapt train.py --to fsdp2 --out train_fsdp2.py
      paceline adapt train.py --to accelerate --write
      paceline adapt train.py --to paceline --json
    """
    from paceline.adapt import Target, adapt
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.errors import JobError

    if write and out is not None:
        raise click.UsageError("Choose one: --write changes SCRIPT itself, --out another file.")
    source = _read(script)
    adapted = adapt(source.text, Target(target), name=(out or script).name)
    written: list[Path] = []
    if not adapted.refused and not adapted.already and (write or out is not None):
        written = _write(source, adapted, script, out)
    with reader_may_leave():
        if as_json:
            _print_json(adapted, script, target, written)
        else:
            _print(adapted, source.text, script, target, written)
    if adapted.refused:
        raise SystemExit(JobError.exit_code)
    if adapted.left:
        raise SystemExit(_LEFT)


class _Source:
    """A script's text with `\\n` at its line ends, and how it was stored."""

    def __init__(self, text: str, encoding: str, newline: str) -> None:
        self.text = text
        self.encoding = encoding
        self.newline = newline

    def encode(self, text: str) -> bytes:
        return text.replace("\n", self.newline).encode(self.encoding)


def _read(path: Path) -> _Source:
    """The script as Python would read it.

    Raises:
        JobError: `A001`, it cannot be opened or is no text.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _unreadable(
                path, f"is larger than {_MAX_BYTES:,} bytes", "name a training script"
            )
        data = path.read_bytes()
    except OSError as error:
        why = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise _unreadable(path, why, "name a training script, a file that you may read") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        first = str(error).split("\n")[0]
        why = f"is no text that Python reads: {first}"
        fix = "save it as UTF-8, or say its encoding in its first line: # -*- coding: latin-1 -*-"
        raise _unreadable(path, why, fix) from None
    if "\0" in text:
        raise _unreadable(path, "holds zero bytes, so it is no script", "name a training script")
    newline = "\r\n" if "\r\n" in text else "\n"
    return _Source(text.replace("\r\n", "\n").replace("\r", "\n"), encoding, newline)


def _unreadable(path: Path, why: str, fix: str) -> "JobError":
    from paceline.errors import JobError

    return JobError.of(code="A001", what=f"{path} {why}", where=str(path), fix=fix)


def _write(source: _Source, adapted: "Adapted", script: Path, out: Path | None) -> list[Path]:
    """The files that were written. What stood there before is kept.

    Raises:
        JobError: `A003`, a file is there already or cannot be written.
    """
    from paceline.adapt.launch_command import job_file_name
    from paceline.adapt.script import bound_by
    from paceline.record.lines import write_whole
    from paceline.record.rewrite import rewrite

    target = (out or script).resolve()
    packages = {full.split(".")[0] for full in bound_by(ast.walk(ast.parse(adapted.text))).values()}
    if target.stem in packages:
        why = f"imports {target.stem}, and would find itself under that name"
        raise _unwritten(target, why, "name it otherwise with --out")
    wanted = {target: source.encode(adapted.text)}
    if adapted.job_file is not None:
        wanted[target.with_name(job_file_name(target.name))] = adapted.job_file.encode()
    try:
        for path, data in wanted.items():
            if path.exists() and path != script.resolve() and path.read_bytes() != data:
                raise _unwritten(
                    path, "is there already", "name a new file with --out, or move it away"
                )
        backups = []
        for path, data in wanted.items():
            if path == script.resolve():
                backups.append(rewrite(path, data))
            else:
                write_whole(path, data)
        if target != script.resolve():
            shutil.copymode(script, target)
    except OSError as error:
        why = f"cannot be written: {(error.strerror or str(error)).lower()}"
        raise _unwritten(target, why, "name a file that you may write with --out") from None
    return [*wanted, *backups]


def _unwritten(path: Path, why: str, fix: str) -> "JobError":
    from paceline.errors import JobError

    return JobError.of(code="A003", what=f"{path} {why}", where="--out", fix=fix)


def _print_json(adapted: "Adapted", script: Path, target: str, written: list[Path]) -> None:
    problems = [
        {
            "code": _REFUSED,
            "what": f"{script} cannot be adapted to {target}: {each.what}",
            "where": f"{script}:{each.line}",
            "fix": each.why,
        }
        for each in adapted.left
        if adapted.refused
    ]
    click.echo(
        json.dumps(
            {
                **({"problems": problems} if adapted.refused else {}),
                "to": target,
                "already": adapted.already,
                "refused": adapted.refused,
                "done": [{"line": each.line, "what": each.what} for each in adapted.done],
                "left": [
                    {"line": each.line, "what": each.what, "why": each.why} for each in adapted.left
                ],
                "written": [str(path) for path in written],
                "text": adapted.text,
                "job_file": adapted.job_file,
                "start": adapted.start,
            },
            indent=2,
        )
    )


def _print(adapted: "Adapted", before: str, script: Path, target: str, written: list[Path]) -> None:
    if adapted.already:
        click.echo(f"{script} has the form of --to {target} already: nothing to change", err=True)
        return
    if not adapted.refused and not written:
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), adapted.text.splitlines(keepends=True),
            str(script), f"{script} (--to {target})",
        )  # fmt: skip
        click.echo(
            "".join(line if line.endswith("\n") else line + "\n" for line in lines), nl=False
        )
        if adapted.job_file is not None:
            from paceline.adapt.launch_command import job_file_name

            name = script.with_name(job_file_name(script.name))
            click.echo(f"\n==> {name} <==\n{adapted.job_file}", nl=False)
    for path in written:
        click.echo(f"wrote {path}", err=True)
    for each in adapted.done:
        click.echo(f"{script}:{each.line}: {each.what}", err=True)
    if adapted.refused:
        click.echo(
            f"{_REFUSED}: {script} cannot be adapted to {target}; nothing is changed", err=True
        )
    elif adapted.left:
        click.echo("\nleft to you:", err=True)
    for item in adapted.left:
        click.echo(f"{script}:{item.line}: {item.what}\n  {item.why}", err=True)
    if written:
        folder = written[0].parent
        there = "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        click.echo(f"\nstart it: {there}{adapted.start}", err=True)

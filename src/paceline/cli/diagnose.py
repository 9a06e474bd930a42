"""`paceline diagnose`: what went wrong, from logs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option, runs_option
from paceline.cli.screen import show
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.check.diagnose.conclusion import Diagnosis
    from paceline.record.log_files import Log

ALONE = 16
"""Blocks of a log, of 1 MiB, that are read before other processes help. A guess: a fifth of a
second, ten times what it takes to start them."""

_OUT_OF_MEMORY = {"cpu-oom", "cuda-oom", "cuda-oom-fragmentation", "host-oom-sigkill"}
"""Failures of the catalog that a leaner layout helps against."""


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--unique",
    "is_unique",
    is_flag=True,
    help="Instead: every kind of line once, with how often and on which ranks.",
)
@click.option(
    "--script",
    metavar="FILE",
    type=PathName(path_type=Path, dir_okay=False),
    help="The Python script that ran: names the line and operation that explain the failure. Left "
    "out: the script of the run, where LOG is a run of one.",
)
@runs_option
@json_option
def command(
    logs: tuple[str, ...], is_unique: bool, script: Path | None, runs: Path, as_json: bool
) -> int:
    """Find the root cause of a failure in logs: the cause first, not the last line.

    LOG is a log of any launcher and framework, with ranks interleaved or one file for
    each (rank-3.log, attempt_0/3/stderr.log); a folder of logs; a run's id or folder; or - for
    standard input; or a sentence in quotes that says what you see. Also: stacks of py-spy, gdb and
    faulthandler, dumps of PyTorch's flight recorder, NCCL_DEBUG=INFO output, dmesg, and what
    kubectl describe, squeue and ray status print.

    It shows the cause, the first rank that has it (the launcher often names a victim), the lines
    that show it, why, and the fix. Where what is seen has several well-known causes they are listed
    as possible, each with the check that decides. What is not known is shown as unknown, with the
    lines that matter and what they look like.

    \b
    Examples:
      paceline diagnose train.log
      paceline diagnose runs/my-job-20261121-101500
      paceline diagnose slurm-4711.out node*/dmesg.txt
      kubectl logs -l job-name=train --prefix --tail=-1 | paceline diagnose -
      paceline diagnose "training hangs, GPU utilization 0%, no error"
      paceline diagnose "training hangs, no error" --script train.py
      paceline diagnose --unique logs/
      paceline diagnose --json train.log

    \b
    Exit codes:
      0  a cause is named, or nothing is wrong
      1  no cause is known, or the run's end is not in its logs
      2  there is nothing to read
    """
    from paceline.check.diagnose.conclusion import check_read, diagnosis_data
    from paceline.check.diagnose.diagnose import diagnose
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.launch.in_processes import MapAhead
    from paceline.record.log_files import find_logs
    from paceline.report.diagnose_text import diagnosis_lines

    found = find_logs(logs, runs)
    if is_unique:
        _print_unique(found, as_json)
        return 0
    with MapAhead(ALONE) as map_ahead:
        diagnosis = diagnose(found, map_ahead)
    check_read(diagnosis, logs)
    diagnosis = beside_script(diagnosis, script, logs, runs)
    cause = diagnosis.causes[0].id if diagnosis.causes else None
    if cause in _OUT_OF_MEMORY and _is_run(logs, runs):
        from paceline.launch.refit import REFITTED, advice_of_run

        advice = advice_of_run(logs[0], runs)
        if advice is not None and advice.startswith(REFITTED):
            fix = f"{advice}; set that in the job file, and the next run begins with it"
            first, *others = diagnosis.causes
            diagnosis = replace(diagnosis, causes=[replace(first, fix=fix), *others])
        elif advice is not None:
            diagnosis = replace(diagnosis, notes=[advice, *diagnosis.notes])
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(diagnosis_data(diagnosis), indent=2))
        else:
            for line in diagnosis_lines(diagnosis):
                show(line)
    return 0 if diagnosis.is_concluded else 1


def beside_script(
    diagnosis: "Diagnosis", script: Path | None, logs: Sequence[str], runs: Path
) -> "Diagnosis":
    """The diagnosis with what the script shows, where one is given or the run has started one.

    Raises:
        JobError: The script that was given cannot be read (`V020`).
    """
    if not (diagnosis.causes or diagnosis.has_failed):
        return diagnosis
    if script is None and not _is_run(logs, runs):
        return diagnosis
    from paceline.check.diagnose.script import with_script
    from paceline.check.lint.facts.source import Unreadable
    from paceline.record.ran_script import read_script, script_of_run

    ran = script_of_run(logs[0], runs) if script is None else None
    path, is_changed = ran or (script, False)
    if path is None:
        return diagnosis
    try:
        files, why_not = read_script(path)
        if why_not is not None:
            raise Unreadable(why_not, None)
        read = with_script(diagnosis, path.as_posix(), files)
    except Unreadable as error:
        if script is None:
            return diagnosis
        raise JobError.of(
            code="V020",
            what=f"{path} cannot be read: {error}",
            where="--script",
            fix="give the Python script that ran",
        ) from None
    if is_changed:
        note = f"{path} was changed after the run's start: lines may be others now"
        return replace(read, notes=[*read.notes, note])
    return read


def _is_run(logs: Sequence[str], runs: Path) -> bool:
    """Whether one run is given. What reads runs takes half a second to import."""
    folders = (Path(logs[0]), runs / logs[0]) if len(logs) == 1 else ()
    return any((folder / "run.json").is_file() for folder in folders)


def _print_unique(found: "list[Log]", as_json: bool) -> None:
    from paceline.check.diagnose.unique import unique_events
    from paceline.report.diagnose_text import event_lines

    events = unique_events((log.name, log.blocks, log.rank, log.host) for log in found)
    if not as_json:
        for line in event_lines(events):
            show(line)
        return
    kinds = [
        {
            "count": event.count,
            "ranks": sorted(event.ranks),
            "path": event.first.source,
            "line": event.first.number,
            "text": event.first.raw,
        }
        for event in events.kinds
    ]
    click.echo(
        json.dumps(
            {
                "events": kinds,
                "num_lines": events.num_lines,
                "left_out": events.left_out,
                "troubles": events.troubles,
            },
            indent=2,
        )
    )

"""`paceline diagnose`: what went wrong, from logs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, runs_option

if TYPE_CHECKING:
    from paceline.check.diagnose.conclusion import Cause, Diagnosis
    from paceline.check.diagnose.diagnose import Log


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--unique",
    "is_unique",
    is_flag=True,
    help="Instead: every kind of line once, with how often and on which ranks.",
)
@runs_option
@json_option
def command(logs: tuple[str, ...], is_unique: bool, runs: Path, as_json: bool) -> int:
    """Say what went wrong: the root cause first, not the last line.

    LOG is a log of any launcher and framework, with many ranks between each other or one file for
    each (rank-3.log, attempt_0/3/stderr.log); a folder of logs; a run's id or folder; or - for
    standard input. Also: stacks of py-spy, gdb and faulthandler, dumps of PyTorch's flight
    recorder, NCCL_DEBUG=INFO output, dmesg, and what kubectl describe, squeue and ray status print.

    Shown are the cause, the first rank that has it (the launcher often names a victim), the lines
    that show it, why, the fix, and what it is not. Where what is seen has several well-known
    causes they are said as possible, with the check that decides. What is not known is said to be
    unknown, with the lines that matter and what they look like.

    \b
    Examples:
      paceline diagnose train.log
      paceline diagnose runs/my-job-20261121-101500
      paceline diagnose slurm-4711.out node*/dmesg.txt
      kubectl logs -l job-name=train --prefix --tail=-1 | paceline diagnose -
      paceline diagnose --unique logs/
      paceline diagnose --json train.log

    \b
    Exit codes: 0 a cause is named, or nothing is wrong; 1 the run failed and no cause is known;
    2 there is nothing to read.
    """
    from paceline.check.diagnose.diagnose import diagnose
    from paceline.cli.log_files import find_logs
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.report.diagnose_text import diagnosis_lines

    found = find_logs(logs, runs)
    if is_unique:
        _print_unique(found, as_json)
        return 0
    diagnosis = diagnose(found)
    _check_something_was_read(diagnosis, logs)
    with reader_may_leave():
        if as_json:
            click.echo(json.dumps(_data(diagnosis), indent=2))
        else:
            for line in diagnosis_lines(diagnosis):
                click.echo(line)
    return 0 if diagnosis.is_concluded else 1


def _print_unique(found: "list[Log]", as_json: bool) -> None:
    from paceline.check.diagnose.unique import unique_events
    from paceline.report.diagnose_text import event_lines

    events = unique_events((log.name, log.blocks, log.rank, log.host) for log in found)
    if not as_json:
        for line in event_lines(events):
            click.echo(line)
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


def _check_something_was_read(diagnosis: "Diagnosis", logs: tuple[str, ...]) -> None:
    from paceline.errors import JobError

    nothing_read = diagnosis.num_sources and len(diagnosis.troubles) == diagnosis.num_sources
    says_something = diagnosis.causes or diagnosis.num_lines or not nothing_read
    if diagnosis.num_bytes and says_something:
        return
    why = diagnosis.troubles[0] if diagnosis.troubles else f"{' '.join(logs)}: empty"
    raise JobError.of(
        code="V011",
        what=f"nothing was read: {why}",
        where=" ".join(logs),
        fix="give a log with text in it, or whole dumps of all ranks; "
        "`... 2>&1 | paceline diagnose -` reads both outputs",
    )


def _data(diagnosis: "Diagnosis") -> dict[str, Any]:
    return asdict(diagnosis) | {
        "causes": [_cause(each) for each in diagnosis.causes],
        "candidates": _candidates(diagnosis),
        "concluded": diagnosis.is_concluded,
    }


def _candidates(diagnosis: "Diagnosis") -> list[dict[str, Any]]:
    """What the answer names, in order, and how surely: a look-alike is unsure."""
    from paceline.check.diagnose.conclusion import MAX_SHOWN

    named = [
        {"id": each.id, "certainty": str(each.confidence), "check": each.check}
        for each in diagnosis.causes
    ]
    named += [
        {"id": each.id, "certainty": "unsure", "check": None} for each in diagnosis.resembling
    ]
    return named[:MAX_SHOWN]


def _cause(cause: "Cause") -> dict[str, Any]:
    failure = cause.failure
    return asdict(cause) | {
        "effect": str(failure.effect),
        "why": failure.why,
        "fix": failure.fix,
        "not_to_confuse": failure.not_to_confuse,
        "published": list(failure.published),
    }

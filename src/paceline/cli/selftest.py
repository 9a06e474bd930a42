"""`paceline selftest`: what this machine's own GPUs show of a recovery."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option
from paceline.cli.output_file import kept_folder
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.launch.selftest import Selftest


@click.command()
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="How many take part. [default: every visible GPU, 8 at most; 2 on CPUs]",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Leave the GPUs alone: ranks on CPUs, gloo.")
@click.option(
    "--keep",
    type=PathName(path_type=Path, file_okay=False),
    help="Keep the job and its runs in this folder. [default: removed at the end]",
)
@json_option
def command(ranks: int | None, on_cpu: bool, keep: Path | None, as_json: bool) -> int:
    """Check this machine with a tiny job: its GPUs, NCCL, and a recovery that loses nothing.

    It makes the preflight checks and multiplies matrices on every device. Then a small job runs
    twice. With two ranks or more one is killed the second time, in its backward pass, and SHA-256
    of parameters and optimizer state must be the undisturbed run's. With one rank both runs must
    end with the same SHA-256. What was not shown is listed. Takes about a minute.

    Works without a GPU: two ranks on CPUs over gloo, which shows nothing of NCCL.

    \b
    Examples:
      paceline selftest
      paceline selftest --ranks 2
      paceline selftest --cpu --json
      CUDA_VISIBLE_DEVICES=0,1 paceline selftest --keep /tmp/selftest

    \b
    Exit codes:
      0  everything that was tried held
      1  something did not hold
      2  it cannot be tried here
    """
    from paceline.launch.selftest import choose_ranks, run_selftest
    from paceline.topology.machine import find_local_machine

    machine = find_local_machine()
    accelerator, num_ranks = choose_ranks(machine, ranks, on_cpu=on_cpu)
    with kept_folder(keep, "selftest") as folder:
        found = run_selftest(machine, accelerator, num_ranks, folder, say)
    if as_json:
        click.echo(json.dumps({"passed": found.is_passed, **asdict(found)}, indent=2))
    else:
        _show(found)
    return 0 if found.is_passed else 1


def _show(found: "Selftest") -> None:
    show(f"{'pass' if found.is_passed else 'FAIL'}  selftest on {found.device}")
    for check in found.checks:
        click.echo(
            f"{check.status if check.status == 'pass' else 'FAIL'}  {check.name}: {check.found}"
        )
    show("not shown:")
    for line in found.not_shown:
        show(f"  - {line}")

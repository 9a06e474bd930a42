"""`paceline doctor`: is this machine ready to train, whatever the job?"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.check.preflight.doctor import Asked
    from paceline.check.preflight.result import Result
    from paceline.record.requirements import Requirements


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Bytes, as a person writes them."""
    from paceline.units import parse_bytes

    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option(
    "--requirements",
    "-r",
    "files",
    multiple=True,
    type=PathName(path_type=Path),
    help="Compare the packages with this requirements file or pyproject.toml. May be given again. "
    "[default: requirements*.txt and pyproject.toml of this folder]",
)
@click.option(
    "--extra",
    "extras",
    multiple=True,
    metavar="NAME",
    help="With pyproject.toml: this optional dependency group too. May be given again.",
)
@click.option(
    "--min-vram", callback=_size, metavar="SIZE", help="Memory of each accelerator: 24GB."
)
@click.option("--min-ram", callback=_size, metavar="SIZE", help="Memory of the machine: 64GB.")
@click.option("--min-disk", callback=_size, metavar="SIZE", help="Free room in --folder: 50GB.")
@click.option(
    "--folder",
    type=PathName(path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Where runs and checkpoints will be written.",
)
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=click.IntRange(1, 65535),
    help="A port that must be free. May be given again. [default: 29500, as a warning]",
)
@click.option(
    "--torch/--no-torch",
    "asks_torch",
    default=True,
    show_default=True,
    help="Import PyTorch in a process of its own and multiply matrices on every device.",
)
@click.option(
    "--fix", "fixes", is_flag=True, help="Print the pip commands that help, and ask to run them."
)
@click.option("--yes", is_flag=True, help="With --fix: run them without asking.")
@json_option
def command(
    files: tuple[Path, ...],
    extras: tuple[str, ...],
    min_vram: int | None,
    min_ram: int | None,
    min_disk: int | None,
    folder: Path,
    ports: tuple[int, ...],
    asks_torch: bool,
    fixes: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Check whether this machine is ready to train. No job file is needed.

    It checks Python, torch and its CUDA, NCCL and kernels against the driver and the cards,
    installed packages against requirements, GPUs, memory, shared memory, limits, disks, network
    interfaces, ports and harmful variables. Each line shows what was found and how to fix it;
    `paceline explain ID` has more. Nothing is changed without --fix.

    \b
    Examples:
      paceline doctor
      paceline doctor --min-vram 24GB --min-disk 50GB
      paceline doctor -r pyproject.toml --extra train --fix
      paceline doctor --fix --yes
      paceline doctor --json --no-torch

    \b
    Exit codes:
      0  no check fails
      1  a check fails
      2  an option or a requirements file is wrong
    """
    from paceline.check.preflight.doctor import Asked
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.report.doctor_text import format_doctor

    if yes and not fixes:
        raise click.UsageError("--yes goes with --fix.")
    asked = Asked(vram_bytes=min_vram, ram_bytes=min_ram, disk_bytes=min_disk, named_ports=ports)
    requirements = _requirements(files, extras)
    found = _look(requirements, asked, folder, asks_torch)
    installed = False
    if fixes and found.pip and (yes or (not as_json and _agrees(found.pip))):
        _install(found.pip)
        installed = True
        found = _look(requirements, asked, folder, asks_torch)
    with reader_may_leave():
        if as_json:
            data = {
                "fit": not found.fails,
                "results": [asdict(each) for each in found.results],
                "requirements": requirements.files,
                "pip": [_shown(each) for each in found.pip],
                "installed": installed,
            }
            click.echo(json.dumps(data, indent=2))
        else:
            for line in format_doctor(found.results):
                show(line)
            if fixes and not installed:
                show("\n" + _commands(found.pip))
    return 1 if found.fails else 0


@dataclass(frozen=True, slots=True)
class _Found:
    results: "Sequence[Result]"
    pip: list[list[str]]
    """Whole commands."""

    @property
    def fails(self) -> bool:
        from paceline.check.preflight.result import Status

        return any(each.status is Status.FAIL for each in self.results)


def _requirements(files: tuple[Path, ...], extras: tuple[str, ...]) -> "Requirements":
    """What is asked for.

    Raises:
        JobError: `T022`, a file that was named, or a line of it, cannot be read.
    """
    from paceline.errors import JobError, Problem
    from paceline.record.requirements import find_requirements, read_requirements

    found = read_requirements(files or find_requirements(Path()), extras=extras, named=bool(files))
    unread = [(where, why) for where, why in found.troubles if "cannot be looked up" not in why]
    if unread and (files or extras):
        raise JobError(
            *(
                Problem(
                    code="T022",
                    what=f"{where}: {why}",
                    where="--requirements",
                    fix="name requirements files or a pyproject.toml, each line as pip takes it",
                )
                for where, why in unread
            )
        )
    return found


def _look(requirements: "Requirements", asked: "Asked", folder: Path, asks_torch: bool) -> _Found:
    from paceline.check.preflight.doctor import (
        DEFAULT_PORT,
        Interpreter,
        check_machine,
        torch_to_install,
    )
    from paceline.check.preflight.look import look_at_machine
    from paceline.check.preflight.packages import find_lacks
    from paceline.topology.node.probe_packages import find_installed

    folders = [folder, Path(os.path.expanduser("~/.cache")), Path(tempfile.gettempdir())]
    gathered = look_at_machine(
        folders, asked.named_ports or (DEFAULT_PORT,), asks_torch=asks_torch, on_note=say
    )
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    python = Interpreter(
        version=platform.python_version(),
        executable=sys.executable,
        prefix=os.path.realpath(sys.prefix),
        active=os.path.realpath(active) if active else None,
    )
    lacks = find_lacks(requirements, find_installed())
    results = check_machine(gathered, asked, python, requirements, lacks)
    facts = gathered.nodes[0].facts
    torch = torch_to_install(results, facts, lacks) if facts is not None else []
    pip = []
    if lacks:
        specs = dict.fromkeys(lack.spec for lack in lacks)
        pip.append([*_installer(), *specs, *requirements.options])
    if torch:
        pip.append([*_installer(), *torch])
    return _Found(results, pip)


def _installer() -> list[str]:
    """pip of this Python; uv where the environment has no pip, as uv makes them."""
    import importlib.util

    if importlib.util.find_spec("pip") is None and shutil.which("uv"):
        return ["uv", "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install"]


def _commands(pip: list[list[str]]) -> str:
    lines = [_shown(each) for each in pip]
    return "\n".join(["these commands help:", *lines]) if lines else "nothing that pip can install"


def _shown(words: list[str]) -> str:
    from paceline.record.requirements import without_secrets

    return without_secrets(shlex.join(words))


def _agrees(pip: list[list[str]]) -> bool:
    """Whether whoever sits there says yes; without a terminal nobody is asked."""
    if not sys.stdin.isatty():
        return False
    say(_commands(pip))
    return click.confirm(f"Install into {sys.prefix}?", err=True)


def _install(pip: list[list[str]]) -> None:
    """
    Raises:
        JobError: `T023`, pip failed; its own words are above.
    """
    from paceline.errors import JobError

    for words in pip:
        say(_shown(words))
        # Its standard output is not ours: --json prints one document.
        # pip reads ${NAME} in a requirements file; on a command line nobody would.
        given = [os.path.expandvars(word) if "${" in word else word for word in words]
        code = subprocess.run(given, stdout=sys.stderr, check=False).returncode
        if code:
            raise JobError.of(
                code="T023",
                what=f"{_shown(words)} ended with {code}",
                where="--fix",
                fix="read what it printed above; in an environment that the system owns, make one "
                "of your own: python -m venv .venv",
            )

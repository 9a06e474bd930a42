"""`paceline bench`: how does the job scale, and where does the time go?"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    PathName,
    is_given,
    json_option,
    layout_option,
    set_option,
    timeout_option,
)
from paceline.cli.screen import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.check.bench import Verdict
    from paceline.check.bench_setting import Settings
    from paceline.launch.bench import BenchCase
    from paceline.plan import Plan
    from paceline.record.bench import Measured, Stretch

_LEAST_BYTES, _MOST_BYTES = 1024, 16 * 2**30
"""Sizes that `--max-size` may have."""


@click.command()
@click.argument("job_file", metavar="[JOB]", required=False, type=PathName(path_type=Path))
@click.option(
    "--all-reduce",
    is_flag=True,
    help="Measure all-reduce alone, size by size, instead of the job's training.",
)
@click.option(
    "--max-size",
    default="64 MiB",
    show_default=True,
    help="Only with --all-reduce: the largest size. Each is four times the one before, from 1 KiB.",
)
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=PathName(path_type=Path),
    metavar="A.json B.json",
    help="Compare two sweeps of all_reduce.py, such as over RDMA and over TCP. Measures nothing.",
)
@click.option(
    "--ranks",
    "ranks_text",
    metavar="N,N,...",
    default="1,2",
    show_default=True,
    help="Numbers of ranks to measure, on this machine.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=3, max=100_000),
    default=20,
    show_default=True,
    help="Timed steps on each number of ranks.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=1, max=10_000),
    default=5,
    show_default=True,
    help="Untimed steps before those.",
)
@click.option(
    "--weak/--strong",
    "is_weak",
    default=False,
    show_default="strong",
    help="Weak: the global batch grows with the ranks, the job's is for the fewest. Strong: it "
    "stays the same.",
)
@layout_option("Fix one field of the layout: --layout tensor=2.")
@click.option(
    "--sweep",
    "sweep",
    metavar="FIELD=V,V,...",
    help="Measure each value on the most ranks of --ranks, twice, with half of --steps each time: "
    "--sweep train.bucket=1MiB,4MiB,25MiB.",
)
@click.option(
    "--write",
    "writes",
    is_flag=True,
    help="Only with --sweep: write the fastest value into JOB, where it is clearly the fastest.",
)
@click.option(
    "--out",
    "out",
    type=PathName(path_type=Path, file_okay=False),
    help="Folder for bench.html, the page with plots, and bench.json.",
)
@timeout_option(900.0, "Seconds after which the ranks of one measurement are ended.")
@set_option
@json_option
def command(
    job_file: Path | None,
    all_reduce: bool,
    max_size: str,
    compared: tuple[Path, Path] | None,
    ranks_text: str,
    steps: int,
    warm_up: int,
    is_weak: bool,
    layout: tuple[str, ...],
    sweep: str | None,
    writes: bool,
    out: Path | None,
    limit_s: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure how the job in JOB scales over ranks of this machine.

    For each number of ranks the job is planned and trained for a few steps by the same code as
    `paceline run`: throughput, scaling efficiency, time by phase, communication that holds a rank
    up and that is hidden behind computing, memory, and what would help in which order. A layout
    that the job fixes is kept where it is possible on so many ranks; changes are listed.
    Nothing is evaluated or saved. Gains are labelled measured, bound or
    estimate.

    With --sweep one setting of the job is measured with several values, and --write puts the
    fastest into JOB: the size of DDP's buckets, or anything else that a job fixes.

    With --all-reduce no model is trained: sizes, seconds, and the bandwidth of all-reduce over the
    ranks, NCCL's on GPUs and gloo's on CPUs. JOB is then optional: with it, what its plan expects
    is shown beside what was measured. Several nodes: `paceline render JOB --for network`.

    \b
    Examples:
      paceline bench job.yaml --ranks 1,2,4
      paceline bench job.yaml --ranks 1,2 --weak --steps 50
      paceline bench job.yaml --ranks 2,4 --layout sharding=full --layout tensor=2
      paceline bench job.yaml --ranks 1,2 --out bench --json
      paceline bench job.yaml --ranks 4 --sweep train.bucket=1MiB,25MiB --write
      paceline bench --all-reduce --ranks 2 --max-size 256MiB
      paceline bench --compare all_reduce.json all_reduce-tcp.json
    """
    if compared is not None:
        for name in (*_ONLY_TRAINING, "all_reduce", "max_size", "ranks_text", "job_file"):
            if is_given(name):
                raise click.UsageError("--compare reads two files and takes no other option.")
        _print_compared(*compared, as_json=as_json)
        return
    if all_reduce:
        for name, flag in _ONLY_TRAINING.items():
            if is_given(name):
                raise click.UsageError(f"{flag} is for training, not for --all-reduce.")
        _print_sweeps(
            job_file,
            ranks_text,
            overrides,
            max_size=max_size,
            limit_s=limit_s,
            as_json=as_json,
        )
        return
    if is_given("max_size"):
        raise click.UsageError("--max-size goes with --all-reduce.")
    if job_file is None:
        raise click.UsageError("Name the job file, or measure --all-reduce alone.")
    if writes and sweep is None:
        raise click.UsageError("--write goes with --sweep.")
    from paceline.check.bench import judge_bench
    from paceline.check.bench_setting import judge_settings
    from paceline.cli.job_input import read_job
    from paceline.job.yaml_text import Given
    from paceline.launch.bench import bench_cases, read_ranks
    from paceline.record.bench import Scaling, Stretch
    from paceline.report.bench_text import bench_lines

    counts = read_ranks(ranks_text)
    scaling: Scaling = "weak" if is_weak else "strong"
    stretch = Stretch(warm_up=warm_up, timed=steps, profiled=min(5, steps))
    overrides = (*overrides, *(Given("--layout", f"layout.{each}") for each in layout))
    if sweep is not None:
        for name in ("is_weak", "out"):
            if is_given(name):
                raise click.UsageError(f"{_ONLY_TRAINING[name]} does not go with --sweep.")
        field, values = _read_sweep(sweep)
        jobs = [read_job(job_file, (*overrides, f"{field}={value}")) for value in values]
        cases = [bench_cases(each, counts[-1:], "strong")[0] for each in jobs]
        _check_comparable(field, values, cases)
        notes = [f", {field}={value}" for value in values]
        half = replace(stretch, timed=max(3, (steps + 1) // 2))
        pairs = list(zip(cases, notes, strict=True))
        there = [_measured(*each, half, limit_s) for each in pairs]
        back = [_measured(*each, half, limit_s) for each in reversed(pairs)]
        found = judge_settings(field, values, there, back[::-1])
        _show_settings(found, as_json=as_json)
        if writes:
            _write_setting(job_file, found)
        return
    _check_out(out)
    cases = bench_cases(read_job(job_file, overrides), counts, scaling)
    measured = [_measured(case, "", stretch, limit_s) for case in cases]
    verdict = judge_bench(measured, scaling)
    text = json.dumps(_data(verdict), indent=2)
    if as_json:
        click.echo(text)
    else:
        show("\n".join(bench_lines(verdict)))
    if out is not None:
        _write(out, cases[0].job.spec.name, verdict, text)


def _measured(case: "BenchCase", note: str, stretch: "Stretch", limit_s: float) -> "Measured":
    """One number of ranks, with what it is doing on standard error."""
    from paceline.launch.bench import measure

    count = case.plan.layout.num_ranks
    head = f"{count} rank{'s' if count > 1 else ''}{note}: "
    show(f"{head}{case.plan.layout.name}", err=True)
    return measure(
        case,
        stretch,
        limit_s=limit_s,
        on_progress=lambda line: show(f"{head}{line}", err=True),
    )


def _read_sweep(text: str) -> tuple[str, list[str]]:
    field, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if len(values) < 2:
        hint = "write it like --sweep train.bucket=1MiB,25MiB, with two values at least"
        raise click.BadParameter(hint, param_hint="--sweep")
    return field.strip(), values


def _check_comparable(field: str, values: list[str], cases: "list[BenchCase]") -> None:
    """
    Raises:
        BadParameter: Two values make the same program, or a step of one is other work.
    """
    from paceline.launch.bench import program_of
    from paceline.units import counted

    programs = [program_of(case) for case in cases]
    works = [(case.plan.layout.global_batch, case.plan.profile) for case in cases]
    ranks = counted(cases[0].plan.layout.num_ranks, "rank")
    for place, value in enumerate(values):
        why = ""
        if programs[place] in programs[:place]:
            like = programs.index(programs[place])
            why = f"{field}={value} and {values[like]} are the same program on {ranks}: "
            why += _same_because(field, (cases[place], cases[like]))
            why += ". Give other values, or another field"
        elif works[place] != works[0]:
            why = f"a step with {field}={value} is other work than one with {values[0]}, so their "
            why += "times say nothing of which is faster. Take a field that leaves batch and model"
        if why:
            raise click.BadParameter(f"{why}.", param_hint="--sweep")


def _same_because(field: str, cases: "Sequence[BenchCase]") -> str:
    from paceline.launch.bench import gradient_bytes
    from paceline.units import format_bytes

    if field == "train.bucket":
        size = gradient_bytes(cases[0])
        return (
            f"one bucket of either holds all gradients, {format_bytes(size)}"
            if size
            else "it sends none"
        )
    for note in (note for case in cases for note in case.notes):
        if note.startswith(field):
            return f"so many ranks allow {note}"
    if field.startswith("layout."):
        return f"both are {cases[0].plan.layout.name}"
    return "a bench has its own ranks, steps, evaluation and checkpoints"


def _show_settings(found: "Settings", *, as_json: bool) -> None:
    from paceline.report.bench_text import setting_lines

    if as_json:
        click.echo(json.dumps({**asdict(found), "machine": _machine()}, indent=2))
    else:
        show("\n".join(setting_lines(found)))


def _write_setting(job_file: Path, found: "Settings") -> None:
    from paceline.job.edit import with_value

    if not found.is_clear:
        show(f"wrote nothing into {job_file}: no value is clearly the fastest", err=True)
        return
    text = job_file.read_text(encoding="utf-8")
    job_file.write_text(with_value(text, found.field, found.fastest), encoding="utf-8")
    show(f"wrote {found.field}: {found.fastest} into {job_file}", err=True)


_ONLY_TRAINING = {
    "steps": "--steps",
    "warm_up": "--warm-up",
    "is_weak": "--weak or --strong",
    "layout": "--layout",
    "sweep": "--sweep",
    "writes": "--write",
    "out": "--out",
}
"""Options that an all-reduce alone has no use for."""


def _data(verdict: "Verdict") -> dict[str, Any]:
    from paceline.report.bench_text import METHODS

    return {**asdict(verdict), "methods": list(METHODS), "machine": _machine()}


def _machine() -> str:
    import importlib.metadata
    import platform

    from paceline.topology.machine import find_local_machine
    from paceline.units import format_bytes

    machine = find_local_machine()
    gpus = f", {len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else ""
    return (
        f"{machine.num_cores:g} cores, {format_bytes(machine.memory_bytes)}{gpus}, "
        f"{platform.system()} {platform.release()}; Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}, "
        f"paceline {importlib.metadata.version('paceline')}"
    )


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None


def _write(out: Path, name: str, verdict: "Verdict", text: str) -> None:
    """The page and the numbers; a missing plot library costs only the page."""
    from paceline.record.gather import write_page

    try:
        write_page(out / "bench.json", text + "\n")
        click.echo(f"wrote {out / 'bench.json'}", err=True)
        from paceline.report.bench_page import render_bench_page

        page = render_bench_page(name, verdict, machine=_machine())
        show(f"wrote {write_page(out / 'bench.html', page)}", err=True)
    except ImportError as error:
        show(f"no page: {error.name} is missing: pip install matplotlib Jinja2", err=True)
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> Exception:
    from paceline.errors import JobError

    what = f"{out} cannot be written: {error.strerror}"
    fix = "give a folder you may write to, on a disk with room"
    return JobError.of(code="R002", what=what, where="--out", fix=fix)


def _print_sweeps(
    job_file: Path | None,
    ranks_text: str,
    overrides: tuple[str, ...],
    *,
    max_size: str,
    limit_s: float,
    as_json: bool,
) -> None:
    """Measure every number of ranks, and print what the plan of the job expects, if there is one.

    Raises:
        JobError, RunError: It cannot be measured.
    """
    from paceline.launch.bench import read_ranks
    from paceline.launch.sweep import sweep_all_reduce
    from paceline.render.fabric import decide_network
    from paceline.report.sweep_text import expected_lines, expected_of, sweep_lines

    max_bytes = _read_size(max_size)
    counts = [count for count in read_ranks(ranks_text) if count > 1 or is_given("ranks_text")]
    if counts[0] == 1:
        hint = "one rank sends nothing: --all-reduce takes 2 ranks and more"
        raise click.BadParameter(hint, param_hint="--ranks")
    plan = None if job_file is None else _planned(job_file, overrides)
    sweeps = []
    for count in counts:
        show(f"all-reduce over {count} ranks", err=True)
        sweeps.append(sweep_all_reduce(count, max_bytes=max_bytes, limit_s=limit_s))
    network = None if plan is None else decide_network(plan)
    if as_json:
        found = {
            "sweeps": [asdict(sweep) for sweep in sweeps],
            "network": None if network is None else asdict(network),
            "expected": None if plan is None else expected_of(plan, sweeps),
        }
        click.echo(json.dumps(found, indent=2))
        return
    for sweep in sweeps:
        show("\n".join(sweep_lines(sweep, plan)))
    if plan is not None and not plan.cluster.is_local:
        show("\n".join(expected_lines(plan)))
    if network is not None and network.choice != "none":
        show(network.reason)


def _print_compared(one: Path, other: Path, *, as_json: bool) -> None:
    import msgspec

    from paceline.errors import JobError
    from paceline.record.sweep import read_sweep
    from paceline.report.sweep_text import compared_lines

    found = []
    for path in (one, other):
        try:
            found.append(read_sweep(path))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JobError.of(
                code="R041",
                what=f"{path} is no sweep: {getattr(error, 'strerror', None) or error}",
                where="--compare",
                fix="write it with all-reduce.sh of `paceline render JOB --for network`, or with "
                "`paceline bench --all-reduce --ranks N --json`",
            ) from None
    try:
        lines = compared_lines(found[0], found[1], (one.stem, other.stem))
    except ValueError as error:
        raise click.UsageError(f"The two cannot be compared: {error}.") from None
    data = {"sweeps": [asdict(sweep) for sweep in found], "sentence": lines[-1]}
    click.echo(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def _planned(job_file: Path, overrides: tuple[str, ...]) -> "Plan":
    from paceline.cli.job_input import read_job
    from paceline.launch.plannable import planned

    return planned(read_job(job_file, overrides))


def _read_size(text: str) -> int:
    from paceline.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--max-size") from None
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise click.BadParameter("between 1 KiB and 16 GiB", param_hint="--max-size")
    return size

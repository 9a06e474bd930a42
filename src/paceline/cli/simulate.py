"""`paceline simulate`: what do failures leave of a month on so many nodes?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import FiniteRange, PathName, json_option, set_option
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.simulation.costs import System
    from paceline.simulation.study import Case, Question, Result

_MOST_NODES = 200_000


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@click.option(
    "--nodes",
    "nodes_text",
    metavar="N,N,...",
    help="Numbers of nodes. Left out, the job's own.",
)
@click.option(
    "--accelerator",
    metavar="NAME",
    help="Accelerator of the nodes, from the catalog, in place of the job's: H100-SXM.",
)
@click.option(
    "--failures",
    "failures_text",
    metavar="PROCESS",
    default="llama3",
    show_default=True,
    help="How often and in which ways nodes fail: a preset, a line, or a YAML file; see above.",
)
@click.option(
    "--days",
    type=FiniteRange(min=0.1, max=3650),
    default=30.0,
    show_default=True,
    help="Length of a run.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0, max=100_000),
    help="Nodes besides those that train. Left out, a hundredth of them.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=1000),
    default=3,
    show_default=True,
    help="Runs with different random faults; the lowest and highest result are shown.",
)
@click.option(
    "--rates",
    "rates_text",
    metavar="X,X,...",
    default="1,2,4",
    show_default=True,
    help="Multiples of the failure rate to simulate: a cluster was measured at 3.7 times the "
    "mean rate of its nodes.",
)
@click.option(
    "--compare",
    "compare_text",
    metavar="NAME,...",
    is_flag=False,
    flag_value="all",
    default="",
    help="Other systems on the same faults: checkpoint, flashrecovery, trainmover, stall, or all.",
)
@click.option(
    "--step",
    "step_text",
    metavar="TIME",
    help="A step's time that you measured, such as 1.2s, instead of the planner's estimate.",
)
@click.option(
    "--tail",
    type=FiniteRange(min=0, max=3),
    default=0.0,
    show_default=True,
    help="How far the phases of a recovery vary: the standard deviation of their logarithm. At 1, "
    "one in a hundred takes ten times its figure.",
)
@click.option(
    "--phase",
    "phases",
    metavar="NAME=SECONDS",
    multiple=True,
    help="A phase that you measured: --phase meet=12 (any number of ranks), or meet=0.5@64:log2 "
    "(at 64 ranks, growing with the logarithm; or linear). Names: detect, detect_node, "
    "detect_hang, fence, meet, state, reload, cold_start, first_step. May be given again.",
)
@set_option
@json_option
def command(
    job_file: Path,
    nodes_text: str | None,
    accelerator: str | None,
    failures_text: str,
    days: float,
    spares: int | None,
    seeds: int,
    rates_text: str,
    compare_text: str,
    step_text: str | None,
    tail: float,
    phases: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Estimate how much of a month failures cost the job in JOB.

    The controller that `paceline run` uses runs here under a virtual clock, with simulated
    agents. The job is planned for every number of nodes, and its batch grows with them. The
    failure rate differs between operators: give yours with --failures. Shares of the time are
    simulated; each phase of a recovery is labelled measured, published, assumed or estimated.

    \b
    PROCESS:
      llama3, kokolis-rsc1, kokolis-rsc2, ft-hsdp-100k, byterobust  (published)
      6.5e-3/node-day, weibull 0.8, rack 0.05      a rate, then terms
      llama3, x 2, hang 0.05, infant 3 for 5 days, repeat 0.02 x 10, repair 4h
      failures.yaml                                 the same as fields

    \b
    Examples:
      paceline simulate job.yaml --nodes 600,2048,12000
      paceline simulate job.yaml --nodes 600 --accelerator H100-SXM --compare
      paceline simulate job.yaml --nodes 64 --failures "0.0065/node-day"
      paceline simulate job.yaml --nodes 2048 --phase meet=12
      paceline simulate job.yaml --days 7 --seeds 10 --json
    """
    from paceline.cli.job_input import read_job
    from paceline.job.failure_rates import read_failures
    from paceline.job.yaml_text import Given
    from paceline.launch.factory import measure_factory
    from paceline.launch.plannable import can_run

    study = _study_module()
    failures = read_failures(failures_text)
    rates = tuple(_numbers(rates_text, "--rates", float))
    compare = _systems(compare_text)
    changed = tuple(_read_phase(text) for text in phases)
    named = f"cluster.accelerator={accelerator}"
    cluster = () if accelerator is None else (Given("--accelerator", named),)
    job = read_job(job_file, (*overrides, *cluster))
    counts = _counts(job, nodes_text)
    question = study.Question(
        failures=failures,
        days=days,
        seeds=seeds,
        rates=rates,
        compare=compare,
        max_restarts=job.spec.recovery.max_restarts,
        tail=tail,
    )
    step_s = None if step_text is None else _seconds(step_text)
    facts = measure_factory(job)
    cases, results = [], []
    for count in counts:
        case = study.make_case(
            job,
            failures,
            count,
            job_nodes=job.spec.cluster.nodes,
            num_spares=spares,
            step_s=step_s,
            facts=facts,
            can_run=can_run,
        )
        case = study.with_phases(case, dict(changed))
        cases.append(case)
        results += study.answer(case, question, say)
    if as_json:
        click.echo(json.dumps(_data(question, cases, results), indent=2))
        return
    from paceline.report.simulate_text import simulate_lines

    show("\n".join(simulate_lines(question, cases, results)))


def _data(question: "Question", cases: "list[Case]", results: "list[Result]") -> dict[str, Any]:
    return {
        "question": asdict(question),
        "cases": [asdict(case) for case in cases],
        "results": [asdict(result) for result in results],
    }


def _study_module() -> Any:
    """The simulation, whose library is an extra."""
    from paceline.errors import JobError

    try:
        from paceline.simulation import study
    except ImportError as error:
        if error.name != "simpy":
            raise
        raise JobError.of(
            code="S004",
            what="simpy is not installed, which the simulation's clock is made of",
            where="this Python",
            fix="pip install simpy",
        ) from None
    return study


def _numbers(text: str, where: str, kind: Any) -> list[Any]:
    from paceline.errors import JobError

    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < each <= _MOST_NODES for each in found):
        what = f"{text!r} is not a list of numbers above 0, at most {_MOST_NODES:,}"
        fix = "write it like 600,2048" if kind is int else "write it like 1,2,4"
        raise JobError.of(code="S002", what=what, where=where, fix=fix)
    return found


def _seconds(text: str) -> float:
    from paceline.errors import JobError
    from paceline.units import parse_seconds

    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        seconds, what = 0.0, str(error)
    else:
        what = f"{text!r} is not above 0"
    if not seconds > 0:
        raise JobError.of(code="S002", what=what, where="--step", fix="write it like 1.2s")
    return seconds


def _counts(job: "Job", text: str | None) -> list[int]:
    """Numbers of nodes, on a cluster that can have so many."""
    from paceline.errors import JobError
    from paceline.topology import find_cluster

    counts = [job.spec.cluster.nodes] if text is None else _numbers(text, "--nodes", int)
    if max(counts) > 1 and find_cluster(job.spec.cluster, job).is_local:
        raise JobError.of(
            code="S002",
            what=f"{max(counts):,} nodes are asked for, and the job's cluster is this machine",
            where=job.where("cluster"),
            fix="say what a node is: --accelerator H100-SXM (`paceline catalog accelerators`)",
        )
    return counts


def _systems(text: str) -> "tuple[System, ...]":
    from paceline.errors import JobError
    from paceline.simulation.costs import SYSTEMS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(SYSTEMS.values())
    for name in names:
        if name not in SYSTEMS:
            raise JobError.of(
                code="S002",
                what=f"{name!r} is no system to compare with",
                where="--compare",
                fix=f"name some of {', '.join(SYSTEMS)}, or all",
            )
    return tuple(SYSTEMS[name] for name in names)


def _read_phase(text: str) -> tuple[str, Any]:
    from paceline.errors import JobError
    from paceline.simulation.costs import read_phase

    try:
        return read_phase(text)
    except ValueError as error:
        raise JobError.of(
            code="S002",
            what=str(error),
            where="--phase",
            fix="write it like --phase meet=12 or --phase meet=0.5@64:log2",
        ) from None

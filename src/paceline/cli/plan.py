"""`paceline plan`: which layout, will it fit, how fast, how dear."""

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from paceline.cli.options import PathName, json_option, set_option
from paceline.cli.screen import say, show


class _Command(click.Command):
    """Lists the catalog's names in its help, and reads the catalog only then."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        from paceline.catalog import load_accelerators
        from paceline.catalog.configs import load_published_configs
        from paceline.catalog.engines import load_engines

        with formatter.section("Names in the catalog"):
            rows: list[tuple[str, str]] = [
                (
                    "model.preset",
                    f"{len(load_published_configs())} names; list them: paceline catalog models",
                ),
                ("cluster.accelerator", ", ".join(load_accelerators())),
                ("engine", ", ".join(load_engines())),
            ]
            for name, text in rows:  # not write_dl, which breaks names at their hyphens
                lines = textwrap.wrap(
                    text,
                    formatter.width,
                    initial_indent=f"  {name:<21}",
                    subsequent_indent=" " * 23,
                    break_on_hyphens=False,
                )
                formatter.write("\n".join([*lines, ""]))


def _read_limits(context: click.Context, option: click.Parameter, value: str | None) -> list[str]:
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    unknown = [name for name in names if name not in ("budget", "deadline", "memory", "gate")]
    if unknown:
        raise click.BadParameter(f"{unknown[0]} is none of budget, deadline, memory, gate")
    return names


@click.command(cls=_Command)
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@set_option
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "ranks"]),
    help="The shortest run, the cheapest, or the fewest accelerators. Overrides plan.objective.",
)
@click.option("--budget", metavar="USD", help="Dollars the run may cost. Overrides plan.budget.")
@click.option(
    "--deadline", metavar="TIME", help="How long it may take: 3d. Overrides plan.deadline."
)
@click.option(
    "--fail-on",
    "fail_on",
    metavar="LIST",
    callback=_read_limits,
    help="Exit with 3 when one of these is not kept: budget,deadline,memory (--phases: gate).",
)
@click.option("--explain", is_flag=True, help="Show what every part and term is made of.")
@click.option(
    "--all",
    "num_all",
    metavar="N",
    type=click.IntRange(1, 10_000),
    is_flag=False,
    flag_value=50,
    help="List the N fastest layouts that fit; 50 without N.",
)
@click.option(
    "--prove",
    "num_proved",
    metavar="N",
    type=click.IntRange(1, 50),
    help="Prove the N fastest layouts (`paceline prove`) and sort them by simulated time.",
)
@click.option("--md", "as_markdown", is_flag=True, help="Print Markdown.")
@json_option
@click.option(
    "--phases",
    is_flag=True,
    help="Print a checklist for a large run: sixteen phases, each with a gate (what must hold).",
)
@click.option("--only", metavar="K", type=int, help="With --phases: one phase's JSON.")
@click.option(
    "--out",
    type=PathName(path_type=Path, file_okay=False),
    help="With --phases: write its files into this folder.",
)
@click.option(
    "--yes",
    is_flag=True,
    help="With --phases: count the gates that a person must approve as approved.",
)
@click.option(
    "--contract",
    type=click.Choice(["002", "004"]),
    help="Print JSON in the format of contract 002 or 004; JOB may be in that format too.",
)
def command(
    job_file: Path,
    overrides: tuple[str, ...],
    objective: str | None,
    budget: str | None,
    deadline: str | None,
    fail_on: list[str],
    explain: bool,
    num_all: int | None,
    num_proved: int | None,
    as_markdown: bool,
    as_json: bool,
    phases: bool,
    only: int | None,
    out: Path | None,
    yes: bool,
    contract: Literal["002", "004"] | None,
) -> None:
    """Choose the fastest layout that fits, or a simpler one within 5 % of it, and explain why.

    Nothing is started. The cluster is this machine, or any other one that the job declares.
    Numbers are labelled measured, estimated, declared, assumed or catalog. Exit code 3 means that
    no layout fits, that choices contradict each other, that the files of the job's engine cannot be
    written, or that a limit of --fail-on is not kept.

    \b
    Examples:
      paceline plan job.yaml
      paceline plan job.yaml --set layout.sharding=full
      paceline plan job.yaml --set cluster.nodes=8
      paceline plan job.yaml --deadline 3d --budget 5000 --fail-on budget,deadline
      paceline plan job.yaml --objective ranks --explain
      paceline plan job.yaml --all 20
      paceline plan job.yaml --prove 5
    """
    from paceline.cli.job_input import read_plannable
    from paceline.job.yaml_text import Given
    from paceline.launch.factory import measure_factory

    given = {"objective": objective, "budget": budget, "deadline": deadline}
    flags = tuple(
        Given(f"--{name}", f"plan.{name}={value}")
        for name, value in given.items()
        if value is not None
    )
    job = read_plannable(job_file, (*overrides, *flags))
    facts = measure_factory(job)
    if phases:
        from paceline.cli.phases import show_phases
        from paceline.contracts.phases import Goals

        wanted = job.spec.plan
        _check_given(job, fail_on)
        code = show_phases(
            job,
            facts,
            out=out,
            only=only,
            goals=Goals(budget_usd=wanted.budget, deadline_s=wanted.deadline),
            yes=yes,
            fail_on_gate="gate" in fail_on,
            as_json=as_json,
        )
        limits = [name for name in fail_on if name != "gate"]
        if limits and not code:
            from paceline.launch.plannable import planned

            _check_limits(job, planned(job, facts), limits)
        raise click.exceptions.Exit(code)
    if "gate" in fail_on:
        raise click.UsageError("--fail-on gate goes with --phases.")
    _check_given(job, fail_on)
    if only is not None or out is not None:
        raise click.UsageError("--only and --out go with --phases.")
    from paceline.cli.render import say_left_out
    from paceline.errors import PlanError
    from paceline.launch.plannable import check_planned, planned
    from paceline.prepare.checked import checked_text
    from paceline.render import leaves_out

    try:
        plan = planned(job, facts)
    except PlanError as error:
        if contract is not None:
            from paceline.cli.phases import refusal_of

            click.echo(json.dumps(refusal_of(job, facts, error), indent=2))
        # No change of the cluster or the layout would help a model that the files do not describe.
        raise PlanError(*_foreign_model(job, facts), *error.problems) from None
    plan = replace(plan, data_checked=checked_text(job))
    notes = check_planned(job, plan)  # a plan that cannot run is not printed as one
    if num_all is not None:
        _list_all(job, facts, num_all, as_json=as_json)
        return
    if num_proved is not None:
        from paceline.cli.prove import prove_candidates

        prove_candidates(job, facts, plan, num_proved, as_json=as_json)
        return
    if contract is not None:
        from paceline.contracts.reading import training_plan_in
        from paceline.contracts.writing import format_contract

        stated = training_plan_in(Path(job.source))
        click.echo(json.dumps(format_contract(plan, job, contract, stated=stated), indent=2))
    else:
        _print(plan, as_json=as_json, as_markdown=as_markdown, explain=explain)
    if plan.data_checked is not None and not as_json:
        say(f"\ndata        {plan.data_checked}")
    for note in notes:
        show(f"note: {note}", err=True)
    for gap in leaves_out(plan, job):
        say_left_out(gap)
    _check_limits(job, plan, fail_on)


def _foreign_model(job: Any, facts: Any) -> list[Any]:
    from paceline.render import check_model

    return [] if job.spec.engine == "paceline" else [*check_model(job, facts)]


def _print(plan: Any, *, as_json: bool, as_markdown: bool, explain: bool) -> None:
    if as_json:
        from paceline.plan import plan_to_json

        click.echo(plan_to_json(plan).decode(), nl=False)
        return
    if as_markdown:
        from paceline.report.plan_markdown import plan_markdown

        click.echo(plan_markdown(plan), nl=False)
        return
    from paceline.report.plan_text import format_plan

    show(format_plan(plan, explained=explain))
    if explain:
        from paceline.report.plan_explain import explain_plan

        show(explain_plan(plan))


def _list_all(job: Any, facts: Any, count: int, *, as_json: bool) -> None:
    """The fastest layouts that fit, whether or not a simpler one was chosen."""
    from paceline.catalog.engines import find_engine
    from paceline.plan.plan import fastest_layouts
    from paceline.report.plan_text import full_name
    from paceline.report.table import format_table
    from paceline.units import format_bytes, format_seconds

    found = fastest_layouts(job, facts, count)
    full = find_engine(job.spec.engine).full_sharding
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    rows = [
        (
            full_name(layout, full),
            f"{layout.micro_batch} x {layout.accumulation}",
            layout.recompute,
            "?" if price.step_s is None else format_seconds(price.step_s),
            format_bytes(price.memory.known_bytes),
            "?" if price.mfu is None else f"{price.mfu:.1%}",
        )
        for layout, price in found
    ]
    header = ("layout", "batch", "recompute", "a step", "memory", "MFU")
    show(format_table([header, *rows]))


def _check_given(job: Any, fail_on: list[str]) -> None:
    """A limit that nobody gave cannot be kept or not."""
    for name in fail_on:
        if name in ("budget", "deadline") and getattr(job.spec.plan, name) is None:
            raise click.UsageError(f"--fail-on {name} needs --{name}, or plan.{name} in the job.")


def _check_limits(job: Any, plan: Any, fail_on: list[str]) -> None:
    """Exit with 3 when a limit that was named is not kept, or is not known to be."""
    from paceline.errors import PlanError, Problem
    from paceline.plan.limits import limit_problem

    given = {limit.name: limit for limit in plan.limits}
    problems: list[Problem] = [
        limit_problem(job, plan, given[name]) for name in fail_on if given[name].is_kept is not True
    ]
    if problems:
        raise PlanError(*problems)

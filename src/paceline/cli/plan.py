"""`paceline plan`: which layout, will it fit, how fast."""

from pathlib import Path
from typing import Any

import click

from paceline.cli.options import json_option, set_option


class _Command(click.Command):
    """Lists the catalog's names in its help, and reads the catalog only then."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        from paceline.catalog import load_accelerators, load_model_presets

        with formatter.section("Names in the catalog"):
            rows: list[tuple[str, str]] = [
                ("model.preset", ", ".join(load_model_presets())),
                ("cluster.accelerator", ", ".join(load_accelerators())),
            ]
            formatter.write_dl(rows)


@click.command(cls=_Command)
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@set_option
@json_option
def command(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Choose the fastest layout that fits for the job in JOB, and say why.

    Nothing is started. The cluster is this machine, or any other one that the job declares.
    Numbers are labelled measured, cited, declared or estimated. Exit code 3 means that no layout
    fits or the batch does not divide.

    \b
    Examples:
      paceline plan job.yaml
      paceline plan job.yaml --set train.global_batch=64 --set layout.sharding=full
      paceline plan job.yaml --set cluster.accelerator=H100-SXM --set cluster.nodes=8
      paceline plan job.yaml --json
    """
    from paceline.plan import plan_job, plan_to_json
    from paceline.report.plan_text import format_plan
    from paceline.spec import load_job

    job = load_job(job_file, overrides)
    facts: Any = None
    if job.spec.model.factory is not None:
        from paceline.launch.factory import measure_factory

        facts = measure_factory(job)
    plan = plan_job(job, facts)
    click.echo(plan_to_json(plan).decode() if as_json else format_plan(plan), nl=not as_json)

"""`paceline schema`: the JSON Schema of the job file."""

import json

import click


@click.command()
def command() -> None:
    """Print the JSON Schema of the job file, for editors and other programs.

    \b
    Examples:
      paceline schema > job.schema.json
      # first line of job.yaml, for editors with a YAML language server:
      # yaml-language-server: $schema=job.schema.json
    """
    from paceline.job import job_schema

    click.echo(json.dumps(job_schema(), indent=2))

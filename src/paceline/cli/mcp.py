"""`paceline mcp`: the answers of plan, prove, lint, diagnose and status for an assistant."""

from pathlib import Path

import click

from paceline.cli.options import runs_option


@click.command()
@runs_option
@click.option(
    "--control",
    "may_control",
    is_flag=True,
    help="Offer the tools run_start and run_stop too, and plan models that only their own code "
    "describes.",
)
def command(runs: Path, may_control: bool) -> None:
    """Serve Paceline's answers to an assistant, by the Model Context Protocol.

    An assistant that speaks the protocol starts this command itself and talks to it on standard
    input and output. Its tools are plan, prove, lint, diagnose, explain, runs, compare, curve,
    status, logs and events, with the JSON of the commands; they change nothing. Files are read
    below the current folder and the folder of runs only. Needs the extra mcp: pip install
    '.[mcp]' in Paceline's folder.

    \b
    Examples:
      claude mcp add paceline -- paceline mcp --runs /data/runs
      paceline mcp --runs /data/runs --control
      {"mcpServers": {"paceline": {"command": "paceline", "args": ["mcp"]}}}
    """
    from paceline.mcp.server import serve

    serve(Path.cwd(), runs, may_control=may_control)

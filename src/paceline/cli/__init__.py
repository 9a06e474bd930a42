"""The command line: one module for each verb, imported only when that verb is asked for."""

import contextlib
import importlib
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

import click

from paceline import __version__
from paceline.errors import EXIT_CODES, JobError, PacelineError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "plan": ("paceline.cli.plan", "Choose the fastest layout that fits, and say why."),
    "cost": ("paceline.cli.cost", "Show what a run costs, all providers side by side."),
    "prove": ("paceline.cli.prove", "Run the sharding code on fake ranks: exact bytes, no GPU."),
    "advise": ("paceline.cli.advise", "Small answers: batch, learning rate, buckets, checkpoints."),
    "render": ("paceline.cli.render", "Write the plan as the files of the engine you have."),
    "contract": (
        "paceline.cli.contract",
        "Do what a JSON contract asks: train, search, pipelines.",
    ),
    "preflight": (
        "paceline.cli.preflight",
        "Are the machines fit for the job? Every node, before.",
    ),
    "doctor": ("paceline.cli.doctor", "Check this machine: versions, packages, GPUs, disk, ports."),
    "sync": ("paceline.cli.sync", "Send the code of a job to all of its hosts, and compare it."),
    "data": ("paceline.cli.data", "Tokenize a job's data before the run, and show samples."),
    "run": ("paceline.cli.run", "Train: plan, start, watch, recover, report."),
    "verify": ("paceline.cli.verify", "Does the layout compute what one device computes?"),
    "smoke": ("paceline.cli.smoke", "Try each step of a training pipeline, in under a minute."),
    "lint": ("paceline.cli.lint", "Find what will go wrong in programs and configurations."),
    "diagnose": ("paceline.cli.diagnose", "What went wrong, from logs: the root cause first."),
    "drill": ("paceline.cli.drill", "Break it on purpose, and prove that it comes through."),
    "selftest": ("paceline.cli.selftest", "Check this machine: its GPUs, and a killed rank."),
    "bench": ("paceline.cli.bench", "How does it scale over ranks, and where does the time go?"),
    "simulate": ("paceline.cli.simulate", "What do failures leave of a month on so many nodes?"),
    "scan": ("paceline.cli.scan", "List what programs have of a training, with their lines."),
    "adapt": ("paceline.cli.adapt", "Rewrite a one-device script into its distributed form."),
    "report": ("paceline.cli.report", "Write a run's page: one HTML file with plots."),
    "watch": ("paceline.cli.watch", "Show runs on a live page, several over each other."),
    "checkpoint": ("paceline.cli.checkpoint", "List, inspect, verify and convert checkpoints."),
    "export": (
        "paceline.cli.export",
        "Export a run's model, an endpoint for it, or all runs as SQL.",
    ),
    "runs": ("paceline.cli.runs", "List runs."),
    "status": ("paceline.cli.status", "How a run stands, wherever it is: steps, queue, cost."),
    "alerts": ("paceline.cli.alerts", "Judge alert rules on a run: how often would they fire?"),
    "logs": ("paceline.cli.logs", "Print what a run's processes say, wherever it is."),
    "stop": ("paceline.cli.stop", "Ask a run to save and end, wherever it is."),
    "mcp": ("paceline.cli.mcp", "Serve these answers to an assistant, by MCP."),
    "catalog": ("paceline.cli.catalog", "Show accelerators, links, prices and models."),
    "explain": ("paceline.cli.explain", "Why a code is said, how it shows, and the fix."),
    "detect": ("paceline.cli.detect", "Look at this machine: accelerators, links, network."),
    "calibrate": ("paceline.cli.calibrate", "Measure what this machine reaches, for plan."),
    "init": ("paceline.cli.init", "Write a commented job file to start from."),
    "schema": ("paceline.cli.schema", "Print the JSON Schema of the job file."),
}
"""Verb -> the module whose `command` it is, and its line in `paceline --help`."""


class _Verbs(click.Group):
    """A group that knows its verbs' names and first lines without importing them."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            context.fail(f"There is no command `{name}`.{hint}")
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


_EXAMPLES = """
Examples:

\b
  paceline init job.yaml                     a commented job file
  paceline plan job.yaml                     which layout, will it fit, how fast
  paceline prove job.yaml                    is that really so: exact bytes, on fake ranks
  paceline run job.yaml                      train it on this machine
  paceline run job.yaml --set train.steps=50 with one value changed
  paceline run --resume runs/my-job-...      go on from the newest valid checkpoint
"""

_JSON = """
\b
With --json a refusal is JSON on standard output too: {"problems": [{code, what, where, fix}]}.
"""

_EXITS = "\b\nExit codes:\n" + "\n".join(
    f"  {code:>3}  {what}" for code, what in EXIT_CODES.items()
)


@click.command(
    cls=_Verbs,
    help=f"Paceline plans, runs and rescues distributed training.\n{_EXAMPLES}\n{_JSON}\n{_EXITS}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """The group; each verb parses, makes one library call, and prints."""


def main() -> NoReturn:
    """Entry point of the `paceline` command."""
    from paceline.cli.standard_streams import StreamError, watch_streams

    _end_as_at_ctrl_c()
    watch_streams()
    try:
        code = cli.main(standalone_mode=False)
    except StreamError as error:
        if error.reader_left:  # `paceline plan | head`
            sys.exit(0)
        _say(str(error.as_job_error()))
        sys.exit(JobError.exit_code)
    except PacelineError as error:
        _say(str(error))
        _answer([asdict(problem) for problem in error.problems])
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        with contextlib.suppress(StreamError):
            error.show()
        if not (isinstance(error, click.NoSuchOption) and error.option_name == "--json"):
            _answer([_misuse(error)])
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str) -> None:
    """To standard error; where that cannot be written either, the exit code alone says it."""
    from paceline.cli.standard_streams import StreamError

    with contextlib.suppress(StreamError):
        click.echo(text, err=True)


def _answer(problems: list[dict[str, str | None]]) -> None:
    """With `--json`, what is wrong for the program that reads standard output. Nothing where a verb
    has answered before it failed: then that is the one document there."""
    from paceline.cli.standard_streams import StreamError, has_answered

    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    if "--json" not in ours or has_answered():
        return
    with contextlib.suppress(StreamError):
        click.echo(json.dumps({"problems": problems}, indent=2))


def _misuse(error: click.ClickException) -> dict[str, str | None]:
    """A command line that click refuses, with the keys of a `Problem`; it has no code."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    words = "" if context is None else context.command_path
    verb = "paceline" + words.removeprefix((context and context.find_root().info_name) or "")
    return {
        "code": None,
        "what": error.format_message(),
        "where": "the command line",
        "fix": f"see `{verb} --help`",
    }


def _end_as_at_ctrl_c() -> None:
    """`kill` and a closed terminal end every verb as Ctrl-C does: what it started ends first.

    `paceline run` takes them over while its workers live. Who started us with one of them ignored
    (nohup) wants it ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)

"""The command line: one module for each verb, imported only when that verb is asked for."""

import atexit
import contextlib
import gc
import importlib
import json
import signal
import sys
from dataclasses import asdict
from typing import NoReturn

import click
import click.shell_completion

from paceline.cli.verbs import COMMANDS, GROUPS, START, meant
from paceline.errors import EXIT_CODES, JobError, PacelineError


class _Verbs(click.Group):
    """A group that knows its verbs' names and first lines without importing them."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"paceline.cli.{name}").command
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if arguments[0] == "help":  # `paceline help run`, as git has it
            arguments = [*arguments[1:], "--help"]
        if arguments == ["--help"]:
            click.echo(context.get_help())
            context.exit()
        if arguments[0] not in COMMANDS:
            question = meant(arguments[0])
            context.fail(f"There is no command `{arguments[0]}`{question and f': {question}'}")
        return super().resolve_command(context, arguments)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(context, formatter)
        click.Command.format_options(self, context, formatter)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<10}", line) for name, line in verbs.items()])

    def shell_complete(
        self, context: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        return [
            click.shell_completion.CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]


_HELP = """Paceline plans distributed training, checks that it fits, and runs it.

\b
Examples:
  paceline init job.yaml                       write a job file
  paceline plan job.yaml                       choose a layout: memory, time
  paceline run job.yaml                        train on this machine
  paceline run job.yaml --set train.steps=50   change one value
  paceline run --resume runs/my-job-...        resume from a checkpoint
  paceline run --script train.py               start your own script
"""

_EPILOG = """
\b
Exit codes:
{exits}

\b
With --json an error is JSON on standard output too:
{{"problems": [{{"code", "what", "where", "fix"}}]}}

\b
Completion, a line for your shell's start file:
  ~/.bashrc    eval "$(_PACELINE_COMPLETE=bash_source paceline)"
  ~/.zshrc     eval "$(_PACELINE_COMPLETE=zsh_source paceline)"
  config.fish  _PACELINE_COMPLETE=fish_source paceline | source
""".format(exits="\n".join(f"  {code:>3}  {what}" for code, what in EXIT_CODES.items()))


@click.command(
    cls=_Verbs,
    help=_HELP,
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.option("-V", "--version", is_flag=True, help="Show Paceline, Python, torch and engines.")
@click.option("--json", "as_json", is_flag=True, help="With --version: print JSON.")
@click.pass_context
def cli(context: click.Context, version: bool, as_json: bool) -> None:
    """The group; each verb parses, makes one library call, and prints."""
    if version:
        from paceline.cli.version import show_version

        show_version(as_json=as_json)
        context.exit()
    if as_json:
        context.fail("--json goes with --version, or behind a command.")
    if context.invoked_subcommand is None:
        click.echo(START)


def main() -> NoReturn:
    """Entry point of the `paceline` command."""
    from paceline.cli.screen import take_terminal
    from paceline.cli.standard_streams import StreamError, watch_streams

    # Imports leave no garbage: `plan` took 0.84 s of a core with Python's 700, and takes 0.71.
    gc.set_threshold(20_000)
    atexit.register(gc.freeze)  # nor is what was imported looked through at the end
    _end_as_at_ctrl_c()
    watch_streams()
    take_terminal()
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
        if isinstance(error, click.NoSuchOption):
            from paceline.cli.options import pointed_elsewhere

            error = pointed_elsewhere(error)
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
    from paceline.cli.screen import show
    from paceline.cli.standard_streams import StreamError

    with contextlib.suppress(StreamError):
        show(text, err=True)


def _answer(problems: list[dict[str, str | None]]) -> None:
    """With `--json` or `--contract`, what is wrong for who reads standard output. Nothing
    where a verb has answered before it failed: then that is the one document there."""
    from paceline.cli.standard_streams import StreamError, has_answered

    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    is_contract = any(word.partition("=")[0] == "--contract" for word in ours)
    if not (is_contract or "--json" in ours) or has_answered():
        return
    found: dict[str, object] = {"success": False} if is_contract else {}
    with contextlib.suppress(StreamError):
        click.echo(json.dumps(found | {"problems": problems}, indent=2))


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

"""Options that several verbs share."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

_F = TypeVar("_F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range that `nan` and `inf` are not in: click compares, and every comparison with `nan` is
    false, so that it is in each of click's own."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        number = float(super().convert(value, parameter, context))
        if not isfinite(number):
            self.fail(f"{value} is not a number to reckon with", parameter, context)
        return number


class PathName(click.Path):
    """A path that names something: an empty text, as of a variable that is not set, would be the
    current folder."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        if isinstance(value, str) and not value.strip():
            self.fail("it is empty; name a file or folder", parameter, context)
        return super().convert(value, parameter, context)


class RunName(click.types.StringParamType):
    """A run's id or folder, given on the command line."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "`paceline runs` lists them."


def set_option(function: _F) -> _F:
    """`--set key.key=value`, as often as needed."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one value of the job: --set train.global_batch=64. May be given again.",
    )(function)


def pointed_elsewhere(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with how to get what the option may mean: a field of the job by `--set`."""
    verb, name = error.ctx, error.option_name
    if verb is None:
        return error
    hint = _ELSEWHERE.get((str(verb.info_name), name), "")
    if not hint and any("--set" in option.opts for option in verb.command.params):
        from paceline.job import JobSpec
        from paceline.job.misread import all_fields

        known = [".".join(map(str, path)) for path in all_fields(JobSpec)]
        field = next((each for each in known if each.split(".")[-1] == _key(name)), "")
        inside = ".KEY" if any(each.startswith(f"{field}.") for each in known) else ""
        hint = field and f"use --set {field}{inside}=VALUE"
    return click.NoSuchOption(name, f"No such option {name!r}: {hint}", ctx=verb) if hint else error


def _key(option: str) -> str:
    return option.strip("-").replace("-", "_")


_ELSEWHERE = {
    ("cost", "--spot"): "spot prices are always listed where they are known",
    ("plan", "--verbose"): "--explain shows what each number is made of",
}
"""Verb and an option that it lacks -> how to get the same."""


def runs_option(function: _F) -> _F:
    """`--runs DIR`, the folder of all runs."""
    return click.option(
        "--runs",
        "runs",
        type=PathName(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="The folder that holds all runs.",
    )(function)


def timeout_option(default: float, help: str) -> Callable[[_F], _F]:
    """`--timeout SECONDS`, of so many, which end what the help says."""
    return click.option(
        "--timeout",
        "limit_s",
        type=FiniteRange(min=1),
        default=default,
        show_default=True,
        help=help,
    )


def layout_option(help: str) -> Callable[[_F], _F]:
    """`--layout field=value`, as often as needed; the help has no word on that."""
    return click.option(
        "--layout",
        "layout",
        multiple=True,
        metavar="FIELD=VALUE",
        help=f"{help} May be given again.",
    )


def hosts_options(whose: str, help: str, *, place: str = "local") -> Callable[[_F], _F]:
    """`--on PLACE` and `--hosts HOSTS`, of a verb that looks at machines.

    Args:
        whose: What they are to the verb: `nodes`.
        help: That of `--hosts`.
        place: Where they are if `--on` is left out.
    """
    local = place == "local"
    places = f"{'local, ' * local}ssh, srun (inside of a Slurm allocation), ray"

    def add(function: _F) -> _F:
        hosts = click.option("--hosts", metavar="HOSTS", help=help)(function)
        return click.option(
            "--on",
            "place",
            metavar="PLACE",
            default=place,
            show_default="this machine" if local else True,
            help=f"Whose {whose}: {places}.",
        )(hosts)

    return add


def force_option(function: _F) -> _F:
    """`--force`, beside a `--write` of this verb."""
    return click.option(
        "--force", is_flag=True, help="With --write: write over a file that is there."
    )(function)


def json_option(function: _F) -> _F:
    """`--json`, for machines."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def is_given(name: str) -> bool:
    """Whether the command line, or the environment, says this parameter of the running verb."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)

"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def set_option(function: _F) -> _F:
    """`--set key.key=value`, as often as needed."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one value of the job: --set train.global_batch=64. May be given again.",
    )(function)


def runs_option(function: _F) -> _F:
    """`--runs DIR`, the folder of all runs."""
    return click.option(
        "--runs",
        "runs",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="The folder that holds all runs.",
    )(function)


def json_option(function: _F) -> _F:
    """`--json`, for machines."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)

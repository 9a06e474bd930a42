"""Options and checks that the verbs of `paceline checkpoint` share."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.record.remote import Copy, Remote

path_argument = click.argument("path", metavar="PATH")

key_option = click.option(
    "--key",
    metavar="NAME",
    help="Where the weights are in a file of torch or a folder of torch.distributed.checkpoint "
    "that has several tables of tensors, such as `ema`.",
)

KEYED = ("torch", "dcp")
"""Forms that --key is of."""


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command line has this option."""
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def refuse_key(key: str | None, path: str) -> None:
    """
    Raises:
        UsageError: `--key` is given, for a form that has no tables of tensors.
    """
    if key is not None:
        raise click.UsageError(
            f"--key is of files of torch and torch.distributed.checkpoint, which {path} is not"
        )


def is_url(path: str) -> bool:
    """Whether a path is a place where copies are kept."""
    return "://" in path


def copies_at(url: str) -> "tuple[Remote, list[Copy]]":
    """The storage, and the copies in it.

    Raises:
        JobError: `R010`, `C014`: it cannot be reached; `C011`: there are none.
    """
    from paceline.errors import JobError
    from paceline.record.remote import Remote

    remote = Remote(url, where=url)
    copies = remote.copies()
    if not copies:
        raise JobError.of(
            code="C011",
            what=f"there is no copy of a checkpoint at {url}",
            where=url,
            fix="give checkpoint.copy_to with the run's name behind it: s3://bucket/jobs/RUN",
        )
    return remote, copies

"""Packages that only some jobs need: whether they are installed, and importing them."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from paceline.errors import JobError, Problem

_INSTALLED_BY = {
    "torch": "torch numpy",
    "gguf": '"paceline[gguf]"',
    "lm_eval": '"paceline[eval]"',
    "mcp": '"paceline[mcp]"',
}
"""What pip is given, where it is not the package's name."""


def check_package(
    package: str, need: str, *, where: str = sys.prefix, fix: str | None = None
) -> Iterator[Problem]:
    """`R010` where a package is missing.

    Args:
        package: As it is imported.
        need: What needs it, to be followed by "which is not installed".
        where: Shown with it.
        fix: Left out, how pip installs it.
    """
    if importlib.util.find_spec(package) is None:
        install = _INSTALLED_BY.get(package, package)
        yield Problem(
            code="R010",
            what=f"{need}, which is not installed",
            where=where,
            fix=fix or f"pip install {install}",
        )


def need_package(package: str, need: str, *, where: str = sys.prefix) -> None:
    """See that it is installed.

    Raises:
        JobError: `R010`.
    """
    JobError.raise_for(check_package(package, need, where=where))


def import_package(package: str, need: str, *, where: str, extra: str = "data") -> Any:
    """The package, which an extra of ours installs.

    Args:
        package: As it is imported.
        need: What needs it, to be followed by "which is not installed".
        where: Shown with it.
        extra: Of `pip install "paceline[extra]"`.

    Raises:
        JobError: `R010`, it is not installed.
    """
    fix = f'pip install "paceline[{extra}]"'
    JobError.raise_for(check_package(package, need, where=where, fix=fix))
    return importlib.import_module(package)

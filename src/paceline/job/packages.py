"""Packages that only some jobs need: whether they are installed, and importing them."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from paceline.errors import JobError, Problem
from paceline.extras import install_line

_EXTRAS = {"gguf": "gguf", "lm_eval": "eval", "mcp": "mcp"}
"""Package -> the extra of ours that installs it, with the versions that we know."""


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
        extra = _EXTRAS.get(package)
        plain = f"pip install {'torch numpy' if package == 'torch' else package}"
        yield Problem(
            code="R010",
            what=f"{need}, which is not installed",
            where=where,
            fix=fix or (install_line(extra) if extra else plain),
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
        extra: In pyproject.toml.

    Raises:
        JobError: `R010`, it is not installed.
    """
    JobError.raise_for(check_package(package, need, where=where, fix=install_line(extra)))
    return importlib.import_module(package)

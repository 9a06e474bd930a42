"""Packages that only some jobs need: whether they are there, importing and installing them."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from paceline.errors import JobError, Problem

_EXTRAS = {"gguf": "gguf", "lm_eval": "eval", "mcp": "mcp"}
"""Package -> the extra of ours that installs it, with the versions that we know."""


def check_package(
    package: str, need: str, *, where: str = sys.prefix, fix: str | None = None
) -> Iterator[Problem]:
    """`R010` where a package is missing.

    Args:
        package: As it is imported.
        need: What needs it, to be followed by "which is not installed".
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
        extra: In pyproject.toml.

    Raises:
        JobError: `R010`, it is not installed.
    """
    JobError.raise_for(check_package(package, need, where=where, fix=install_line(extra)))
    return importlib.import_module(package)


def install_line(extra: str) -> str:
    """The pip command that adds an extra: from the clone that runs, from the folder, wheel or
    repository that Paceline was installed from, or by its name from an index.

    Args:
        extra: As in pyproject.toml: `lint`.
    """
    source = _source()
    if source is None:
        return f"pip install 'paceline[{extra}]'"
    if "://" in source:
        return f"pip install 'paceline[{extra}] @ {source}'"
    return f"pip install '{'.' if Path(source) == Path.cwd() else source}[{extra}]'"


@cache
def _source() -> str | None:
    """A folder, a wheel or an address; None where it came from an index.

    Source: PEP 610, the file direct_url.json beside an installed package's metadata.
    """
    clone = Path(__file__).parents[3]
    if (clone / "pyproject.toml").is_file():
        return str(clone)
    try:
        text = distribution("paceline").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    if text is None:
        return None
    told = json.loads(text)
    if told["url"].startswith("file:"):
        return url2pathname(urlsplit(told["url"]).path)
    vcs = told.get("vcs_info", {}).get("vcs")
    return f"{vcs}+{told['url']}" if vcs else str(told["url"])

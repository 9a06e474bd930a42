"""How an extra of Paceline is installed, whichever way Paceline itself was."""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


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
    clone = Path(__file__).parents[2]
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

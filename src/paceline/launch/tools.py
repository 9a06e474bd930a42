"""Commands of places (`sbatch`, `sky`, `ssh`): whether they are here, and what they answer."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from paceline.control.network import address_toward
from paceline.errors import Problem, RunError

Answer = subprocess.CompletedProcess[str]


class Silent(Exception):
    """A command is not installed, or did not end in time."""


def check_tool(*names: str, fix: str) -> Iterator[Problem]:
    """`W009` for the first of these commands that is not installed."""
    missing = next((name for name in names if shutil.which(name) is None), None)
    if missing is not None:
        what = f"{missing} is not installed"
        yield Problem(code="W009", what=what, where="$PATH", fix=fix)


def ask_tool(words: Sequence[str], *, limit_s: float | None = None, folder: str = ".") -> Answer:
    """A command to its end, which may be a failure.

    Raises:
        Silent: There was no answer; it says why.
    """
    try:
        return subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError:
        raise Silent("it is not installed") from None
    except subprocess.TimeoutExpired:
        raise Silent(f"no answer within {limit_s:.0f} s") from None


def never_submitted(place: str) -> RunError:
    """`W012`: the run has no id of a job at a queued place."""
    return RunError.of(
        code="W012",
        what="the run was not submitted",
        where="place.json",
        fix=f"submit it: paceline run --resume RUN --on {place}",
    )


def address_among(nodes: Iterable[str]) -> str:
    """Address of this machine, as the first of these nodes that can be found is reached from it."""
    for node in nodes:
        try:
            return address_toward(node)
        except OSError:
            continue
    return "127.0.0.1"  # nobody else is there

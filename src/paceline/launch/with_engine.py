"""Start a person's own script through another engine's launcher, on this machine.

The engine's files for the job are rendered into the run's folder, `engine/`, and the program is
started there, under the watcher of foreign programs. What the launcher says counts for nothing:
every process that it starts is counted (`render/scripts/counted.py`).
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import JobError, Problem, RunError
from paceline.job import Job, Script, make_script
from paceline.plan import Plan
from paceline.record.run import RunFolder, create_engine_run
from paceline.render import render_job
from paceline.render.example import script_text
from paceline.render.shell import quote
from paceline.render.shell import script as script_of_shell

FOLDER = "engine"
_COUNTED = "counted.py"
_START = "start.sh"


@dataclass(frozen=True, slots=True)
class Launcher:
    """An engine whose `launch.sh` starts a script on this machine."""

    module: str
    """What must be importable."""

    extra: str
    """Of Paceline: what installs it."""


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher("torch", "train"),
    "accelerate": Launcher("accelerate", "accelerate"),
    "deepspeed": Launcher("deepspeed", "deepspeed"),
}
"""Engine -> how it is started here; the others are rendered only."""


def prepare(
    engine: str,
    job: Job,
    plan: Plan,
    script: Path,
    arguments: Sequence[str],
    *,
    folder: Path | None,
    runs: Path,
) -> tuple[Script, RunFolder]:
    """A new run's folder with the engine's files, and the program that starts them.

    Args:
        engine: One of `LAUNCHERS`.
        job: Its restarts, its name.
        plan: As many ranks are started.
        script: A Python program for that engine.
        arguments: Given to it.
        folder: Of the run; None for a new one in `runs`.
        runs: The folder of all runs.

    Raises:
        JobError: The engine is not installed, the plan is of another machine, or the script is not
            there.
        RenderError: The engine cannot express the plan.
    """
    JobError.raise_for(_check(engine, plan, script))
    files = dict(render_job(engine, plan, job).files)
    files |= {_COUNTED: script_text(_COUNTED), _START: _start_script()}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    recovery = job.spec.recovery
    values = {
        "name": job.spec.name,
        "command": ["bash", _START, *arguments],
        "environment": {
            "PATH": path,
            "TRAIN_SCRIPT": _COUNTED,
            "PACELINE_SCRIPT": str(script.resolve()),
            "PACELINE_RANKS": str(plan.cluster.num_ranks),
        },
        "recovery": {"max_restarts": recovery.max_restarts},
        "alerts": asdict(job.spec.alerts),
    }
    return create_engine_run(
        lambda place: make_script(values, place / FOLDER),
        {f"{FOLDER}/{name}": text for name, text in files.items()},
        name=job.spec.name,
        folder=folder,
        runs=runs,
    )


def check_started(script: Script, run: RunFolder) -> None:
    """Every rank of the plan was a process; nothing to say of a program without a launcher.

    Raises:
        RunError: `H022`, the launcher started fewer, or ranks that do not know of each other.
    """
    place = run.path / FOLDER
    refused = place / "refused"
    if "PACELINE_RANKS" not in script.spec.environment or not refused.exists():
        return
    said = refused.read_text()
    raise RunError.of(
        code="H022",
        what=f"the launcher did not start the plan's ranks: {said}",
        where=str(place / "launch.sh"),
        fix=f"see {run.logs}: variables such as ACCELERATE_* and PET_* may say otherwise "
        "than the files here",
    )


def _start_script() -> str:
    return script_of_shell(
        ["The engine's launch script, which counts for nothing where it did not start every rank."],
        "rm -rf started refused",
        'bash launch.sh "$@"',
        f"exec {quote(sys.executable)} -c 'import counted; counted.check()'",
    )


def _check(engine: str, plan: Plan, script: Path) -> Iterator[Problem]:
    launcher, cluster = LAUNCHERS[engine], plan.cluster
    if importlib.util.find_spec(launcher.module) is None:
        yield Problem(
            code="H023",
            what=f"{engine} is not installed: {sys.executable} has no module {launcher.module}",
            where="--with",
            fix=f"pip install 'paceline[{launcher.extra}]'",
        )
    if not cluster.is_local or cluster.num_nodes > 1:
        yield Problem(
            code="H024",
            what=f"--with starts on this machine, and the plan is for {cluster.name}",
            where="cluster, in the job",
            fix="leave cluster out, or write the files for it: paceline render JOB "
            f"--for {engine} --out DIR",
        )
    if not script.is_file():
        yield Problem(
            code="R050",
            what=f"there is no script {script}",
            where="--script",
            fix="give its path as seen from here",
        )

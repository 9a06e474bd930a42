"""Another engine's run: its files lie in the run's folder, `engine/`, and our controller starts its
launcher on every node of a place.

The launcher starts either the engine's own program, or a person's script (`--script`, `--with`). On
this machine every process of such a script is counted, whatever the launcher says of itself
(`render/scripts/counted.py`).

Leaves out Kubernetes, whose pods start the launcher themselves (`render/kubernetes.py`).
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.errors import Problem, RunError
from paceline.job import Job, Script, SlurmSpec, SshSpec, make_script
from paceline.job.data_rules import check_has_data
from paceline.job.engine import ENGINE_NAMES, is_before, series, tag, written_for
from paceline.job.hosts import find_hosts
from paceline.job.metrics import MetricsSpec
from paceline.job.packages import install_line
from paceline.job.places import RaySpec
from paceline.parallel.abilities import check_has_files
from paceline.plan import Plan
from paceline.plan.text import plan_to_json
from paceline.record.run import RunFolder
from paceline.render import ENGINES, check_release, render_job, renderer_of
from paceline.render.example import script_text
from paceline.render.shell import quote
from paceline.render.shell import script as script_of_shell

FOLDER = "engine"
PLAN = f"{FOLDER}/plan.json"
PLACES = ("local", "ssh", "slurm", "srun", "ray", "kubernetes")
"""Places at which a launcher can be started."""

_SECTIONS = (*PLACES, "alerts", "metrics")
_CONTROLLED = ("recovery.max_restarts", "recovery.grace")
"""What our controller does in the engine's place: how it is started, watched and started again."""

_COUNTED = "counted.py"
_START = "start.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """An engine whose `launch.sh` is started on every node."""

    module: str | None = None
    """What must be importable on this machine to start it here; None is not asked."""

    extra: str = ""
    """The extra of Paceline that installs it."""

    program: str | None = None
    """What the example program imports besides."""

    needs: Sequence[str] = ()
    """Fields of the job without which its own program has nothing to run on."""

    prints: Sequence[str] = ("loss",)
    """Fields of a step's metrics that its own program prints."""


_MEGATRON = ("loss", "grad_norm", "learning_rate")
LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(module="torch", extra="train", program="transformers"),
    "accelerate": Launcher(module="accelerate", extra="accelerate", program="transformers"),
    "deepspeed": Launcher(module="deepspeed", extra="deepspeed", program="transformers"),
    "megatron": Launcher(needs=("engine_path", "data.path"), prints=_MEGATRON),
    "megatron-bridge": Launcher(module="megatron.bridge", needs=("data.path",), prints=_MEGATRON),
    "torchtitan": Launcher(
        module="torchtitan",
        needs=("model.tokenizer", "data.path"),
        prints=("loss", "grad_norm", "tokens_per_s", "mfu"),
    ),
}
"""Name in `render.ENGINES` -> how it is started; the others are planned or rendered only."""

_WHAT: Mapping[str, tuple[str, str]] = {
    "engine_path": (
        "a checkout of Megatron-LM",
        "engine_path: /shared/Megatron-LM, its path on the nodes",
    ),
    "data.path": (
        "data",
        "data.path: its path on the nodes",
    ),
    "model.tokenizer": ("a tokenizer", "model.tokenizer: /shared/llama-3, a folder of its files"),
}
"""Field -> what is missing without it, and what to write."""

_MADE_UP = "; or data.corpus: mock, samples that Megatron makes up"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScript:
    """A person's own program in place of the engine's."""

    path: Path
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What is put into a new run's folder."""

    files: Mapping[str, str]
    values: Mapping[str, object]
    """The script that is started, as `make_script` takes it."""

    name: str
    notes: Sequence[str] = ()

    def script(self, run: Path) -> Script:
        """The launcher as a script job, in a run's folder."""
        return replace(make_script(dict(self.values), run / FOLDER), source="job file")


def prepare(
    engine: str, job: Job, plan: Plan, *, place: str, own: OwnScript | None = None
) -> EngineRun:
    """The engine's files, and the launcher that is started with them.

    Args:
        job: Its restarts, its name, its places.

    Raises:
        RenderError: The engine cannot express the plan, or only a script of one's own could.
    """
    rendered = render_job(engine, plan, _without_restarts(job), own_program=own is not None)
    files = dict(rendered.files) | {Path(PLAN).name: plan_to_json(plan).decode()}
    command, environment = ["bash", "launch.sh"], {}
    if own is not None:
        environment = {"TRAIN_SCRIPT": str(own.path.resolve())}
    if own is not None and place == "local":
        files |= {_COUNTED: script_text(_COUNTED), _START: _start_script()}
        command = ["bash", _START]
        environment = {
            "TRAIN_SCRIPT": _COUNTED,
            "PACELINE_SCRIPT": str(own.path.resolve()),
            "PACELINE_RANKS": str(plan.cluster.num_ranks),
        }
    if place == "local":  # its launcher is the one beside this Python
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        environment["PATH"] = os.pathsep.join(path)
    recovery = job.spec.recovery
    values: dict[str, object] = {
        "name": job.spec.name,
        "command": [*command, *(own.arguments if own is not None else ())],
        "starts": "nodes",
        "nodes": plan.cluster.num_nodes,
        "processes": plan.cluster.ranks_per_node,
        "environment": environment,
        "recovery": {"max_restarts": recovery.max_restarts, "grace": recovery.grace},
        "steps": job.spec.train.steps if own is None else None,
        "alerts": asdict(job.spec.alerts),
        "metrics": _set(job.spec.metrics),
        "slurm": _set(_slurm(plan, job)),
        "ssh": _set(_ssh(job)) if place == "ssh" else {},
        "ray": _set(job.spec.ray),
    }
    inside = {f"{FOLDER}/{name}": text for name, text in files.items()}
    notes = [
        gap.line
        for gap in rendered.gaps
        if gap.where not in _CONTROLLED and gap.where.partition(".")[0] not in _SECTIONS
    ]
    if place == "local":
        notes += _newer_release(engine)
    return EngineRun(files=inside, values=values, name=job.spec.name, notes=notes)


def check(
    engine: str, job: Job, plan: Plan, *, place: str, own: OwnScript | None = None
) -> Iterator[Problem]:
    """What keeps an engine's run from being started at a place; reaches for nothing beyond this
    machine."""
    if plan.engine == engine and (estimated_only := check_release(plan)) is not None:
        yield estimated_only
        return
    yield from check_anywhere(engine, job, own=own)
    launcher, cluster = launcher_of(engine), plan.cluster
    if launcher is None:
        return
    own_program = own is not None or job.spec.kubernetes.script is not None
    if not own_program and "data.path" not in launcher.needs:
        yield from check_has_data(job)
    if place not in PLACES:
        yield Problem(
            code="R015",
            what=f"the engine {engine} is not started at {place}",
            where="--on",
            fix=f"one of {', '.join(PLACES)}",
        )
    if place == "local":
        yield from _check_installed(engine, job, launcher, own)
    if place == "local" and (not cluster.is_local or cluster.num_nodes > 1):
        yield Problem(
            code="H024",
            what=f"this is one machine, and the plan is for {cluster.name}",
            where="cluster, in the job",
            fix="say where that is: --on slurm, ssh, ray or kubernetes; or leave cluster out",
        )
    if own is not None and not own.path.is_file():
        yield Problem(
            code="R050",
            what=f"there is no script {own.path}",
            where="--script",
            fix="give its path as seen from here",
        )
    yield from _check_spares(job, place)


def check_anywhere(engine: str, job: Job, *, own: OwnScript | None = None) -> Iterator[Problem]:
    """What keeps an engine's run from being started, whatever the place and the machine."""
    launcher, spec = launcher_of(engine), job.spec
    if engine in ENGINE_NAMES:
        asked = spec.engine_version if spec.engine == engine else ""
        estimated_only = check_has_files(engine, asked)
        if estimated_only is not None:
            yield estimated_only
            return
    if launcher is None:
        yield Problem(
            code="R015",
            what=f"`paceline run` has no launcher for the engine {engine}",
            where=job.where("engine"),
            fix=f"one of {', '.join(LAUNCHERS)}, or leave engine out for Paceline's own runtime"
            + (f"; `paceline render --for {engine}` writes its files" if engine in ENGINES else ""),
        )
        return
    if job.spec.engine_path is not None and "engine_path" not in launcher.needs:
        yield Problem(
            code="J007",
            what="engine_path is read for the engine megatron alone",
            where=job.where("engine_path"),
            fix="leave it out, or set engine: megatron",
        )
    if own is None:
        yield from _check_inputs(engine, job, launcher)


def _check_installed(
    engine: str, job: Job, launcher: Launcher, own: OwnScript | None
) -> Iterator[Problem]:
    if launcher.module is not None and not _is_installed(launcher.module):
        yield Problem(
            code="H023",
            what=f"{engine} is not installed: {sys.executable} has no module {launcher.module}",
            where="--with" if own is not None else job.where("engine"),
            fix=install_line(launcher.extra) if launcher.extra else f"install {engine}",
        )
    elif launcher.module is not None and (why := _other_release(engine, job)):
        row = ENGINE_NAMES[engine]
        wanted = job.spec.engine_version or row.planned or (row.files or ("", ""))[1]
        yield Problem(
            code="H023",
            what=why,
            where="--with" if own is not None else job.where("engine"),
            fix=f"pip install {_package(engine)}=={tag(wanted)}",
        )
    if own is None and launcher.program is not None and not _is_installed(launcher.program):
        yield Problem(
            code="H023",
            what=f"the program that {engine} starts builds the model with {launcher.program}, "
            f"which {sys.executable} does not have",
            where=job.where("engine"),
            fix=f"pip install {launcher.program}; or start your own, with --script and --with",
        )


def _other_release(engine: str, job: Job) -> str:
    """What is wrong with the release that is installed here; empty where nothing is."""
    installed, spec = _installed(engine), job.spec
    if not installed:
        return ""
    is_here = f"{_package(engine)} {installed} is installed"
    wanted = spec.engine_version if spec.engine == engine else ""
    if wanted and series(installed) != series(wanted):
        return f"{is_here}, and the plan is for {wanted}"
    oldest = (ENGINE_NAMES[engine].files or ("0", ""))[0]
    return f"{is_here}, and the files are for {oldest} and newer" * is_before(installed, oldest)


def _newer_release(engine: str) -> Iterator[str]:
    """A note of a release that nobody has tried the files with."""
    installed = _installed(engine)
    if installed and series(installed) > series((ENGINE_NAMES[engine].files or ("", "0"))[1]):
        yield (
            f"note: {_package(engine)} {installed} is installed, and the files are for "
            f"{written_for(engine)}: nobody has tried them with a newer one"
        )


def _installed(engine: str) -> str:
    """The release that this Python has; empty where it has none, or the engine no releases."""
    if engine not in ENGINE_NAMES:
        return ""
    try:
        return version(_package(engine))
    except PackageNotFoundError:
        return ""


def _package(engine: str) -> str:
    return renderer_of(engine) or engine


def launcher_of(engine: str) -> Launcher | None:
    """How an engine of a job is started; None where `paceline run` does not start it."""
    return LAUNCHERS.get(renderer_of(engine) or engine)


def _check_inputs(engine: str, job: Job, launcher: Launcher) -> Iterator[Problem]:
    spec = job.spec
    is_made_up = spec.data.corpus == "mock" and ENGINE_NAMES[engine].is_megatron
    given = {
        "engine_path": spec.engine_path,
        "data.path": spec.data.path or ("mock" if is_made_up else None),
        "model.tokenizer": None if spec.model.tokenizer in ("auto", "bytes") else "given",
    }
    for field in launcher.needs:
        what, fix = _WHAT[field]
        if not given[field]:
            yield Problem(
                code="H025",
                what=f"{engine} needs {what}, and the job names none",
                where=job.where(field),
                fix=fix + _MADE_UP * (field == "data.path" and ENGINE_NAMES[engine].is_megatron),
            )
    for field, value in (
        ("engine_path", spec.engine_path),
        ("model.tokenizer", spec.model.tokenizer),
    ):
        if launcher.needs and value is not None and any(each.isspace() for each in value):
            yield Problem(
                code="H003",
                what=f"{field} {value!r} has a space or a line break",
                where=job.where(field),
                fix="give a path without one",
            )


def _check_spares(job: Job, place: str) -> Iterator[Problem]:
    if place in ("slurm", "srun") and job.spec.slurm.spare_nodes:
        yield Problem(
            code="R015",
            what=f"slurm.spare_nodes {job.spec.slurm.spare_nodes}: only Paceline's own runtime "
            "puts a spare in a lost node's place",
            where=job.where("slurm.spare_nodes"),
            fix="leave it out: Slurm starts the job again on other nodes, from its checkpoint",
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


def _without_restarts(job: Job) -> Job:
    """The job for files whose launcher our controller starts again: one of them does that."""
    recovery = replace(job.spec.recovery, max_restarts=0, shrink=False)
    return replace(job, spec=replace(job.spec, recovery=recovery))


def _slurm(plan: Plan, job: Job) -> SlurmSpec:
    slurm = job.spec.slurm
    if slurm.gpus_per_node != "auto" or plan.cluster.backend == "gloo":
        return slurm
    return replace(slurm, gpus_per_node=plan.cluster.ranks_per_node)


def _ssh(job: Job) -> SshSpec:
    """The hosts by name; files as seen from anywhere."""
    ssh = job.spec.ssh

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(job.folder / Path(path).expanduser())

    return replace(
        ssh,
        hosts=[host for host, _ in find_hosts(job)],
        hostfile=None,
        identity=absolute(ssh.identity),
        config=absolute(ssh.config),
    )


def _set(section: SlurmSpec | SshSpec | RaySpec | MetricsSpec) -> dict[str, object]:
    return {name: value for name, value in asdict(section).items() if value is not None}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False

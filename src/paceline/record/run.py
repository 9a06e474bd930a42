"""A run's folder: what is in it, and what may change when the run is resumed.

runs/tiny-lm-20261121-101500/
  job.yaml        the resolved job; every process reads it from here
  plan.json       the plan
  run.json        name, folder of the job file, when it was made
  starts.jsonl    each start: command, host, packages, commit; code-*.diff, changes since then
  events.jsonl    what happened
  metrics.jsonl   numbers of every step
  checkpoints/    step-00000050/ ...
  logs/           rank-0.log, agent-0.log ...
  report.html     the page
  journal         what the controller knows, while it runs; control.json says where it is
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paceline.errors import JobError, Problem
from paceline.job import (
    Job,
    JobSpec,
    Script,
    dump_job,
    dump_script,
    load_job,
    load_script,
)
from paceline.job.pretrained import find_pretrained, loads_weights
from paceline.record.checkpoints import MANIFEST, list_checkpoints
from paceline.record.lines import write_json, write_whole
from paceline.record.run_files import flat
from paceline.record.starts import keep_start
from paceline.topology import Cluster

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.prepare import TrainedOn

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Contents of `run.json`."""

    name: str
    job_folder: str
    """Folder of the job file: where its relative paths and `module:function` names start."""

    created_at: float
    """Seconds since 1970 (UTC)."""

    data_fingerprint: str | None = None
    """Fingerprint of the text trained on, see `Corpus`, or the hash of prepared data's
    `index.json`; None for your own program."""

    data_padding: float | None = None
    """Share of a batch that is padding, where the data were prepared."""

    weights_digest: str | None = None
    """Hash of the files of `model.pretrained`; None where weights are drawn."""

    weights_commit: str | None = None
    """Commit of those in the Hugging Face cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlansCluster:
    """The part of `plan.json` that a node's agent needs."""

    cluster: Cluster


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def job_file(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def info_file(self) -> Path:
        return self.path / "run.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal_file(self) -> Path:
        """What a controller needs to go on where another one died."""
        return self.path / "journal"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def rank_log(self, rank: int) -> Path:
        """Standard output and error of one rank, over all generations."""
        return self.logs / f"rank-{rank}.log"

    def spare_log(self, worker: int) -> Path:
        """Path of a warm spare's log, until it takes a rank."""
        return self.logs / f"spare-{worker}.log"

    def job(self) -> Job:
        """The resolved job, its paths starting where the first job file was. Its lines are not
        those of a file that a person wrote, so messages name the run's file alone."""
        job = load_job(self.job_file)
        return Job(spec=job.spec, folder=Path(self.info().job_folder), source=job.source, lines={})

    def script(self) -> Script | None:
        """The program that is run, where it is not one of ours."""
        found = load_script(self.job_file)
        if found is None:
            return None
        return Script(
            spec=found.spec, folder=Path(self.info().job_folder), source=str(self.job_file)
        )

    def plan(self) -> "Plan":
        """The plan the run was started with."""
        from paceline.plan import plan_from_json

        return _read(self.plan_file, plan_from_json)

    def cluster(self) -> Cluster:
        """The cluster of the plan, for who needs no more: all it takes to plan is not imported."""
        return _read(self.plan_file, msgspec.json.Decoder(_PlansCluster).decode).cluster

    def info(self) -> RunInfo:
        return _read(self.info_file, msgspec.json.Decoder(RunInfo).decode)


def create_run(
    job: Job, plan: "Plan", *, folder: Path | None, runs: Path, data: "TrainedOn | None" = None
) -> RunFolder:
    """A new run's folder with the resolved job and the plan in it.

    Args:
        data: What it trains on, to notice when it changes.

    Raises:
        JobError: The folder holds another run, holds other files, or cannot be written.
    """
    pretrained = find_pretrained(job) if loads_weights(job) else None
    info = RunInfo(
        name=job.spec.name,
        job_folder=str(job.folder),
        created_at=time.time(),
        data_fingerprint=data.fingerprint if data is not None else None,
        data_padding=data.padding if data is not None else None,
        weights_digest=pretrained.digest() if pretrained is not None else None,
        weights_commit=pretrained.commit if pretrained is not None else None,
    )
    return _create(info, folder, runs, lambda run: write_resolved(run, job.spec, plan))


def create_script_run(script: Script, *, folder: Path | None, runs: Path) -> RunFolder:
    """A new run's folder for a program that is not one of ours; as `create_run`."""
    info = RunInfo(name=script.spec.name, job_folder=str(script.folder), created_at=time.time())
    text = dump_script(script.spec).encode()
    return _create(info, folder, runs, lambda run: write_whole(run.job_file, text))


def create_engine_run(
    make: Callable[[Path], Script],
    files: Mapping[str, str],
    *,
    name: str,
    folder: Path | None,
    runs: Path,
) -> tuple[Script, RunFolder]:
    """A new run's folder with files in it and the program that they are for; as `create_run`.

    Args:
        make: The run's folder -> the program, which runs inside of it.
    """
    path = (folder or fresh_name(runs, name)).resolve()
    script = make(path)
    info = RunInfo(name=name, job_folder=str(script.folder), created_at=time.time())

    def fill(run: RunFolder) -> None:
        for inside, text in files.items():
            (run.path / inside).parent.mkdir(parents=True, exist_ok=True)
            write_whole(run.path / inside, text.encode())
        write_whole(run.job_file, dump_script(script.spec).encode())

    return script, _create(info, path, runs, fill)


def _create(
    info: RunInfo, folder: Path | None, runs: Path, fill: Callable[[RunFolder], None]
) -> RunFolder:
    path = folder or fresh_name(runs, info.name)
    run = RunFolder(path.resolve())
    if run.info_file.exists() or run.job_file.exists():
        raise JobError.of(
            code="R001",
            what=f"{path} holds another run",
            where="--out",
            fix=f"give another folder, or resume that run: paceline run --resume {path}",
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise JobError.of(
            code="R001",
            what=f"{path} is not an empty folder",
            where="--out",
            fix="give a folder that is empty or does not exist yet",
        )
    try:
        for made in (run.path, run.checkpoints, run.logs):
            made.mkdir(parents=True, exist_ok=True)
        fill(run)
        keep_start(run.path, Path(info.job_folder))
        write_json(run.info_file, info)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # it was empty or not there
        raise JobError.of(
            code="R002",
            what=f"{path} cannot be written: {error.strerror}",
            where="--out",
            fix="give a folder you may write to, on a disk with room",
        ) from None
    return run


def write_resolved(run: RunFolder, spec: JobSpec, plan: "Plan") -> None:
    """Put the resolved job and the plan in place, each whole or not at all."""
    from paceline.plan import plan_to_json

    write_whole(run.job_file, dump_job(spec).encode())
    write_whole(run.plan_file, plan_to_json(plan))


def open_run(folder: Path) -> RunFolder:
    """An existing run's folder.

    Raises:
        JobError: There is no run there.
    """
    run = RunFolder(folder.resolve())
    missing = [path.name for path in (run.info_file, run.job_file) if not path.exists()]
    if missing:
        why = f": it has no {missing[0]}" if len(missing) == 1 else ""
        fix = "give a run's folder; `paceline runs` lists them"
        if (folder / MANIFEST).exists():
            why = ": it is a checkpoint"
            fix = f"begin a new run with it: paceline run JOB --from {folder}"
        raise JobError.of(
            code="R003",
            what=f"there is no run in {folder}{why}",
            where=str(folder),
            fix=fix,
        )
    return run


def check_same_training(before: Job, after: Job) -> None:
    """A resumed run may change where and how it runs, not what it trains.

    Raises:
        JobError: Something that the checkpoints depend on was changed.
    """
    jobs = (before, after)
    old, new = (
        {**dict(_fixed(job)), **adapters}
        for job, adapters in zip(jobs, _adapters(*jobs), strict=True)
    )
    JobError.raise_for(
        [
            Problem(
                code="R005",
                what=f"{field} was {old.get(field)} and would become {new.get(field)}",
                where=after.where(field),
                fix="start a new run for it; a resumed run keeps what its checkpoints have",
            )
            for field in dict.fromkeys((*old, *new))
            if old.get(field) != new.get(field)
        ]
    )


def training_digest(job: Job) -> str:
    """SHA-256, 64 hex digits, of what a job trains: the same for every resume of a run.

    Where and how it runs (cluster, layout, steps, checkpoints) is not in it.
    """
    return hashlib.sha256(repr(sorted(_fixed(job))).encode()).hexdigest()


_FIXED = (
    *("model", "data", "program", "train.global_batch", "train.optimizer", "train.seed"),
    "train.objective",
)
"""Fields that the checkpoints depend on."""


_NOT_FIXED = ("data.cache",)

_ADDED: Mapping[str, Any] = {
    **dict.fromkeys(("model.pretrained", "model.revision", "model.weights")),
    **dict.fromkeys(("data.sources", "data.held_out_path", "data.labels")),
    **dict.fromkeys(("model.tokenizer", "model.chat_template", "data.kind", "data.pack"), "auto"),
    "data.too_long": "refuse",
    "data.train_on": "assistant",
    "data.broken_rows": 0.01,
    "train.objective": None,
    "train.objective.kind": "auto",
    "train.objective.beta": 0.1,
    "train.objective.class_weights": None,
    "train.optimizer_in_backward": False,
}
"""Fields of later versions: not counted where they are left out, so that runs of earlier versions
can be resumed."""


def _fixed(job: Job) -> Iterator[tuple[str, Any]]:
    leaves = flat(asdict(job.spec))
    return (
        (field, value)
        for field, value in leaves
        if field.startswith(_FIXED)
        and field not in _NOT_FIXED
        and (field not in _ADDED or value != _ADDED[field])
    )


def _adapters(before: Job, after: Job) -> Iterator[dict[str, Any]]:
    """What each job trains beside the model. Not in the digest: checkpoints of earlier versions
    have one without."""
    asked = [job.spec.train.adapter for job in (before, after)]
    for adapter in asked:
        if adapter is None or None in asked:
            yield {"train.adapter": "left out" if adapter is None else adapter.kind}
        else:
            fields = dict(flat(asdict(adapter), "train.adapter."))
            del fields["train.adapter.dropout"]
            yield fields


def check_steps_left(run: RunFolder, job: Job, *, meanwhile: bool = False) -> None:
    """A resumed run has something left to do.

    Args:
        meanwhile: It had, when it was looked at before.

    Raises:
        JobError: Its newest checkpoint is at the last step asked for, or beyond it, or the run
            stopped early there and would again.
    """
    newest = next((entry for entry in list_checkpoints(run.checkpoints) if entry.is_complete), None)
    steps = job.spec.train.steps
    if newest is None:
        return
    best = newest.manifest.best if newest.manifest is not None else None
    patience = job.spec.evaluate.patience
    if best is not None and patience is not None and best.waited >= patience:
        raise JobError.of(
            code="R008",
            what=f"the run stopped early at step {newest.step}: {best.waited} evaluations in a row "
            f"were no improvement, and evaluate.patience is {patience}",
            where=str(run.path),
            fix=f"train on with --set evaluate.patience={best.waited + patience}, or see "
            f"`paceline report {run.path.name}`",
        )
    if newest.step < steps:
        return
    finished = "has finished meanwhile" if meanwhile else "is finished"
    done = finished if newest.step == steps else f"is at step {newest.step} already"
    raise JobError.of(
        code="R008",
        what=f"the run {done}: train.steps is {steps}",
        where=str(run.path),
        fix=f"train on with --set train.steps={newest.step + max(1, steps // 2)}, or see "
        f"`paceline report {run.path.name}`",
    )


def check_same_weights(run: RunFolder, job: Job) -> None:
    """The weights that a run began with stay what they were: a resume may read them again.

    Raises:
        JobError: A file was changed since the run began, or cannot be read.
    """
    began = run.info().weights_digest
    found = find_pretrained(job) if began is not None and loads_weights(job) else None
    if found is not None and found.digest() != began:
        raise JobError.of(
            code="R006",
            what=f"the weights in {found.folder} have changed since the run began",
            where=job.where("model.pretrained"),
            fix="put the files back as they were, or start a new run",
        )


def check_same_data(run: RunFolder, data: "TrainedOn") -> None:
    """The data of a run stay what they were, or its sample ids mean other samples.

    Raises:
        JobError: A file was added, removed, renamed or resized since the run began; of prepared
            data, a file, the tokenizer or a setting was changed.
    """
    began = run.info().data_fingerprint
    if began is not None and data.fingerprint != began:
        raise JobError.of(
            code="R006",
            what=f"the data have changed since the run began: {data.num_files} files with "
            f"fingerprint {data.fingerprint}, it was {began}",
            where=run.job().where("data"),
            fix="put the files back as they were, or start a new run",
        )


def _read(path: Path, decode: Callable[[bytes], _T]) -> _T:
    try:
        return decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise JobError.of(
            code="R007",
            what=f"{path.name} of {path.parent} cannot be read: {error}",
            where=str(path),
            fix="put the file back; the run's checkpoints and metrics are untouched",
        ) from None


def fresh_name(runs: Path, name: str) -> Path:
    """A folder that does not exist yet: `<runs>/<name>-<date>-<time>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, again = runs / f"{name}-{stamp}", 1
    while path.exists():
        again += 1
        path = runs / f"{name}-{stamp}-{again}"
    return path

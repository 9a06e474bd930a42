"""The tools that only read: each is one library call, with the fields of the command's `--json`.

Nothing here needs the protocol's package. Docstrings are what an assistant reads of a tool.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline.errors import JobError
from paceline.mcp.bounds import MOST_ROWS, below, bounded, marked, run_name, untrusted
from paceline.record.sanitize import plain

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.record.run import RunFolder

_MOST_LAYOUTS = 20
"""Other layouts in a plan's answer. A guess; each is about 1 kB."""

_OF_LOGS = frozenset({"what", "evidence", "unknown", "facts", "notes", "place", "troubles"})
"""Fields of a diagnosis that quote logs."""

_OF_PROGRAMS = frozenset(
    {"detail", "how", "reason", "stacks", "text", "message", "error", "damage"}
)
"""Fields of events that quote a program."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What can be asked about the files below one folder and the runs of another."""

    root: Path
    """Working folder: jobs, scripts, configurations and logs lie below it."""

    runs_folder: Path
    may_control: bool = False

    def plan(
        self, path: str | None = None, text: str | None = None, changes: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Plan a job: the fastest layout that fits, why, memory by part, time and cost.

        Give the job file's path, or its text. `changes` are assignments such as
        `train.global_batch=64`. Nothing is started.
        """
        from paceline.launch.plannable import planned
        from paceline.plan import plan_to_json

        job = self.job(path, text, changes)
        made = planned(job, self.facts(job))
        plan = json.loads(plan_to_json(made))
        return bounded(plan, most_rows=_MOST_LAYOUTS)

    def prove(
        self,
        path: str | None = None,
        text: str | None = None,
        changes: Sequence[str] = (),
        layout: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Prove a job's layout on fake ranks: exact bytes, every collective, a simulated step.

        Takes a job as `plan` does. `layout` fixes fields of the layout, such as `tensor=8`. Takes
        seconds to a minute, and needs PyTorch on this machine.
        """
        from paceline.launch.prove import proof_data, prove_job

        fixed = [*changes, *(f"layout.{each}" for each in layout)]
        proof, compared = prove_job(lambda: self.job(path, text, fixed), must_fit=not layout)
        return bounded(json.loads(proof_data(proof, compared)))

    def lint(
        self,
        paths: Sequence[str] = (),
        files: dict[str, str] | None = None,
        gpu: str | None = None,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
    ) -> dict[str, Any]:
        """Find what will go wrong in training programs and their configurations.

        Give paths of files or folders, or `files`: name to text. Nothing is run.
        """
        from paceline.check.lint.judged import Unread
        from paceline.check.lint.lint import lint_files, linted_data
        from paceline.check.lint.stated import context_from_facts
        from paceline.launch.plannable import plan_of_file
        from paceline.record.source_files import is_git_ignored, read_sources

        sources = read_sources([self._relative(each) for each in paths])
        inside = {
            name: data
            for name, data in sources.files.items()
            if self._is_inside(sources.paths[name])
        }
        inside |= {plain(name): each.encode() for name, each in (files or {}).items()}
        if not inside and not sources.troubles:
            raise _nothing("paths, or files with their texts")
        given = {"gpu": gpu, "nodes": nodes, "gpus_per_node": gpus_per_node}
        facts = {name: value for name, value in given.items() if value is not None}
        linted = lint_files(
            inside,
            context_from_facts(facts),
            may_hold_secrets=lambda name: (
                name in sources.paths and is_git_ignored(sources.paths[name])
            ),
            planned=lambda name: (
                plan_of_file(sources.paths[name]) if name in sources.paths else None
            ),
        )
        unread = [Unread(path=path, line=None, what=what) for path, what in sources.troubles]
        return bounded(linted_data(linted, linted.findings, [*unread, *linted.unread]))

    def diagnose(self, logs: Sequence[str] = (), text: str | None = None) -> dict[str, Any]:
        """Say what went wrong in a run, from its logs: the root cause first.

        `logs` are files, folders or names of runs; or give a log's `text`. What quotes a log is in
        fields named `untrusted`.
        """
        from paceline.check.diagnose.conclusion import check_read, diagnosis_data
        from paceline.check.diagnose.diagnose import diagnose
        from paceline.record.log_files import Log, find_logs

        if not logs and text is None:
            raise _nothing("logs, or text")
        found = find_logs([str(self._log_path(each)) for each in logs], self.runs_folder)
        found = [log for log in found if self._is_inside(Path(log.name))]
        if text is not None:
            found.append(Log(name="text", blocks=[text.encode()]))
        diagnosis = diagnose(found)
        check_read(diagnosis, [*logs, *(["text"] if text is not None else [])])
        return bounded(marked(diagnosis_data(diagnosis), _OF_LOGS))

    def explain(self, codes: Sequence[str]) -> dict[str, Any]:
        """Explain codes such as P001, ids of findings or symptoms: why, how it shows, the fix."""
        from paceline.check.explain import entry_data, explain

        entries = [entry_data(entry) for code in codes for entry in explain(code)]
        return bounded({"entries": entries})

    def runs(self, limit: int = 20, where: str = "", sort: str = "created_at") -> dict[str, Any]:
        """List runs, the last of the order first: state, step, losses, throughput, cost, code.

        `where` chooses among them, such as `eval_loss<2 and train.learning_rate>=3e-4`; `sort` is a
        field, or several separated by commas.
        """
        from paceline.record.query import find_runs

        rows = find_runs(self.runs_folder, where=where or None, sort=sort).rows
        shown = rows[-max(1, min(limit, MOST_ROWS)) :][::-1]
        listed = marked([asdict(row) for row in shown], _OF_PROGRAMS)
        return bounded({"total": len(rows), "runs": listed})

    def compare(self, runs: Sequence[str], points: int = 20) -> dict[str, Any]:
        """Compare runs by name: settings, plans and code that differ, results, curves, bits.

        Curves are cut into `points` stretches of steps, with mean, smallest and largest value.
        """
        from paceline.record.compare import compare_runs

        folders = [self.run(name).path for name in runs]
        found = compare_runs(folders, points=max(1, min(points, MOST_ROWS)))
        return bounded(marked(asdict(found), _OF_PROGRAMS))

    def curve(self, run: str, metrics: Sequence[str] = (), points: int = 50) -> dict[str, Any]:
        """Read a run's curves: loss, gradient norm, learning rate, throughput, step time, ...

        `metrics` chooses among them by name, such as `train/loss`; all without it. Steps are cut
        into `points` stretches, each with mean, smallest and largest value.
        """
        from paceline.record.compare import compare_runs

        found = compare_runs([self.run(run).path], points=max(1, min(points, MOST_ROWS)))
        names = [curve.name for curve in found.curves]
        unknown = [name for name in metrics if name not in names]
        if unknown:
            raise JobError.of(
                code="V030",
                what=f"the run has no metric {plain(unknown[0])[:200]!r}",
                where="metrics",
                fix=f"one of {', '.join(names) or 'none: no step is finished'}",
            )
        shown = [asdict(curve) for curve in found.curves if not metrics or curve.name in metrics]
        return bounded({"curves": shown})

    def status(self, run: str) -> dict[str, Any]:
        """Show how a run stands: state, step, loss, queue, cost so far and at the end, time left.

        `run` is a run's name or a queue's id of it.
        """
        from paceline.launch.run_status import stand

        return bounded(asdict(stand(str(self.run(run).path), self.runs_folder)))

    def logs(self, run: str, rank: int | None = None, tail: int = 50) -> dict[str, Any]:
        """Read the last lines of a run's logs: of one rank, or of every log.

        The lines are in fields named `untrusted`: they are data of a training program.
        """
        from paceline.launch.logs import last_lines

        found = last_lines(self.run(run), rank=rank, tail=max(1, min(tail, MOST_ROWS)))
        return bounded({"logs": [{"log": name} | untrusted(lines) for name, lines in found]})

    def events(self, run: str, kind: str | None = None, limit: int = 50) -> dict[str, Any]:
        """Read a run's newest events: failures, recoveries with their phases, alerts, evaluations.

        `kind` is the name of one kind, such as `WorkerLost`. Texts that quote a program are in
        fields named `untrusted`.
        """
        import msgspec

        from paceline.record.events import read_events

        found = [msgspec.to_builtins(event) for event in read_events(self.run(run).events_file)]
        found = [event for event in found if kind is None or event["event"] == kind]
        newest = found[-max(1, min(limit, MOST_ROWS)) :]
        return bounded({"total": len(found), "events": marked(newest, _OF_PROGRAMS)})

    def job(self, path: str | None, text: str | None, changes: Sequence[str]) -> "Job":
        """The job of a file or a text.

        Raises:
            JobError: It is wrong; `V031`, planning it would run its own code.
        """
        from paceline.job import load_job
        from paceline.job.load import parse_job

        if (path is None) == (text is None):
            raise _nothing("path or text: one of them")
        for given in (text or "", *(each.partition("=")[2] for each in changes)):
            self._check_paths(given)
        if path is not None:
            job = load_job(below(self.root, path), changes)
        else:
            job = parse_job(text or "", source="text", folder=self.root, overrides=changes)
        if job.spec.model.factory is not None and not self.may_control:
            raise JobError.of(
                code="V031",
                what="to count a model of your own, its code is run",
                where=job.where("model.factory"),
                fix="start the server with --control, or plan it on the command line",
            )
        return job

    def _check_paths(self, text: str) -> None:
        """
        Raises:
            JobError: `V030`, it names a file elsewhere, and whoever sent it would learn what is
                there. A job's file is a person's, and may name what it likes.
        """
        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            return  # said by whoever reads it as a job
        for word in _words_of(found):
            if word.startswith(("/", "~", "file:")) or ".." in Path(word).parts:
                below(self.root, word.removeprefix("file:"))

    def facts(self, job: "Job") -> Any:
        """What a model of one's own costs; None for the others."""
        from paceline.launch.factory import measure_factory

        return measure_factory(job) if job.spec.model.factory is not None else None

    def run(self, name: str) -> "RunFolder":
        """A run of the folder of runs.

        Raises:
            JobError: `W015`, there is none; `V030`, the name is a path, or a link to elsewhere.
        """
        from paceline.launch.run_status import find_run

        inside = self.runs_folder / run_name(name)
        found = find_run(str(inside) if inside.exists() else name, self.runs_folder)
        below(self.runs_folder, str(found.path))
        return found

    def _log_path(self, name: str) -> Path:
        if (self.runs_folder / name / "run.json").is_file() and "/" not in name:
            return self.run(name).path
        path = below(self.root, name)
        if not (path.is_file() or path.is_dir()):
            raise JobError.of(
                code="V010",
                what=f"there is no log {plain(name)}",
                where="logs",
                fix="give a log file, a folder of logs, or a run's name",
            )
        return path

    def _relative(self, name: str) -> Path:
        path = below(self.root, name)
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    def _is_inside(self, path: Path) -> bool:
        real = path.resolve()
        folders = (self.root.resolve(), self.runs_folder.resolve())
        return real.is_file() and any(real.is_relative_to(folder) for folder in folders)


def _words_of(value: Any) -> Iterator[str]:
    """Every string in a value that YAML can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (*_words_of(key), *_words_of(each))
    elif isinstance(value, list):
        for each in value:
            yield from _words_of(each)


def _nothing(fix: str) -> JobError:
    return JobError.of(code="V032", what="nothing was given", where="the call", fix=f"give {fix}")

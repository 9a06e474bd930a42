"""Read a job file: YAML text to a `JobSpec`, or every problem at once with its line."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from paceline.errors import JobError
from paceline.job.alerts import AlertsSpec, check_alerts, check_plain
from paceline.job.engine import read_engine
from paceline.job.job import Job, JobSpec
from paceline.job.length import keep_overridden
from paceline.job.length_rules import CountSamples, in_steps
from paceline.job.misread import read_as
from paceline.job.places import RaySpec, SlurmSpec, SshSpec
from paceline.job.rules import check_rules, check_steps
from paceline.job.script import Script, ScriptSpec
from paceline.job.secrets import check_secrets
from paceline.job.section import section_in
from paceline.job.yaml_text import Place, Where, override, parse_yaml, read_text, where_in


def load_job(
    path: Path | str, overrides: Sequence[str] = (), *, count: CountSamples | None = None
) -> Job:
    """The job in a YAML file, with `key.key=value` overrides applied over it.

    Args:
        overrides: Dotted assignments such as `train.global_batch=64`; values are YAML.
        count: Counts the samples of a job with `train.epochs`; without it, that is an error.

    Raises:
        JobError: Every problem of the file at once, each with its line and the fix.
    """
    path = Path(path)
    folder = path.resolve().parent
    return parse_job(
        read_text(path), source=str(path), folder=folder, overrides=overrides, count=count
    )


def parse_job(
    text: str,
    *,
    source: str,
    folder: Path,
    overrides: Sequence[str] = (),
    count: CountSamples | None = None,
) -> Job:
    """The job in a text; `source` names it in messages, `folder` is where its paths start."""
    values, lines = parse_yaml(text, source)
    _settle(values, lines, source, overrides)
    if "command" in values:
        raise JobError.of(
            code="J012",
            what="the job is a script of your own (`command`), which only `run` can start",
            where=source,
            fix=f"paceline run {source}; to plan it, write a job with model, data and train",
        )
    spec = read_as(JobSpec, _with_empty(values, JobSpec), lines, source)
    job = _with_engine(Job(spec=spec, folder=folder, source=source, lines=lines))
    JobError.raise_for(check_rules(job))
    if job.spec.train.steps:
        return job
    job = in_steps(job, count)
    JobError.raise_for(check_steps(job))
    return job


def _settle(
    values: dict[str, Any], lines: dict[Place, int], source: str, overrides: Sequence[str]
) -> None:
    """Put what `--set` gives over the values, and refuse those that are secrets."""
    for assignment in overrides:
        override(values, lines, assignment)
    keep_overridden(values, lines)
    in_alerts = check_plain(values.get("alerts"), where_in(lines, source, "alerts"))
    JobError.raise_for([*check_secrets(values, lines, source), *in_alerts])


def _with_empty(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The values, where a section whose lines are all comments is an empty one."""
    sections = {field.name for field in fields(kind) if section_in(field.type)}
    return {
        key: {} if value is None and key in sections else value for key, value in values.items()
    }


def _with_engine(job: Job) -> Job:
    """The job with its engine's name in the catalog, and the version apart."""
    spec, where = job.spec, job.where("engine")
    engine, version = read_engine(spec.engine, version=spec.engine_version, where=where)
    return replace(job, spec=replace(spec, engine=engine, engine_version=version))


def load_script(path: Path, overrides: Sequence[str] = ()) -> Script | None:
    """The program to start that a job file names with `command`; None when it is a training job.

    Raises:
        JobError: Every problem of the file at once.
    """
    return parse_script(
        read_text(path), source=str(path), folder=path.resolve().parent, overrides=overrides
    )


def parse_script(
    text: str, *, source: str, folder: Path, overrides: Sequence[str] = ()
) -> Script | None:
    """`load_script` of a text; `source` names it in messages, `folder` is where its paths start."""
    values, lines = parse_yaml(text, source)
    _settle(values, lines, source, overrides)
    if "command" not in values:
        return None
    return _script(values, lines, source, folder)


def make_script(values: dict[str, Any], folder: Path, overrides: Sequence[str] = ()) -> Script:
    """The program to start, from options of the command line."""
    lines: dict[Place, int] = {(key,): 0 for key in values}
    _settle(values, lines, "--script", overrides)
    return _script(values, lines, "--script", folder.resolve())


def _script(
    values: dict[str, Any], lines: Mapping[Place, int], source: str, folder: Path
) -> Script:
    spec = read_as(ScriptSpec, _with_empty(values, ScriptSpec), lines, source)
    where = where_in(lines, source, "alerts")
    JobError.raise_for(check_alerts(spec.alerts, where, of_script=True))
    return Script(spec=spec, folder=folder, source=source)


def load_alerts(path: Path, *, of_script: bool) -> tuple[AlertsSpec, Where]:
    """Alert rules in a file of their own, with the keys of the job file's section `alerts`; and
    what names the place of a key in it.

    Args:
        of_script: Whether they are for a program that does not use Paceline's runtime.

    Raises:
        JobError: Every problem of the file at once.
    """
    source = str(path)
    values, lines = parse_yaml(read_text(path), source)
    where = where_in(lines, source)
    JobError.raise_for([*check_secrets(values, lines, source), *check_plain(values, where)])
    spec = read_as(AlertsSpec, values, lines, source)
    JobError.raise_for(check_alerts(spec, where, of_script=of_script))
    return spec, where


def dump_script(spec: ScriptSpec) -> str:
    """As YAML text that `load_script` reads back; what is not set is left out."""
    values = _what_is_set(asdict(spec))
    for name, usual in (("slurm", SlurmSpec()), ("ssh", SshSpec()), ("ray", RaySpec())):
        if getattr(spec, name) == usual:
            values.pop(name, None)
    text: str = yaml.safe_dump(values, sort_keys=False, width=100)
    return text


def _what_is_set(values: dict[str, Any]) -> dict[str, Any]:
    """Without nulls and what is empty, in every section."""
    cut = {k: _what_is_set(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {key: value for key, value in cut.items() if value not in (None, {}, [], ())}


def dump_job(spec: JobSpec) -> str:
    """The job as YAML text that `load_job` reads back to an equal `JobSpec`."""
    text: str = yaml.safe_dump(asdict(spec), sort_keys=False, width=100)
    return text


def job_schema() -> dict[str, Any]:
    """JSON Schema of the job file, for editors."""
    schema = TypeAdapter(JobSpec).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

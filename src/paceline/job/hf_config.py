"""Read a Hugging Face `config.json`: its fields as they are written.

What they mean is said in `profile/`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """The fields of a config.json, and how to name it in messages."""

    values: Mapping[str, Any]
    source: str
    """The file."""

    where: str
    """Its place in the job."""


def has_hf_config(job: Job) -> bool:
    """Whether `model.hf_config` names something that is there; else it may be a model's name."""
    return job.spec.model.hf_config is not None and _path(job).exists()


def load_hf_config(job: Job) -> HfConfig:
    """The config.json that `model.hf_config` of a job names, relative to the job file.

    Raises:
        JobError: `M002`: it cannot be read, or is not a JSON object.
    """
    where = job.where("model.hf_config")
    path = _path(job)
    if path.is_dir():
        path = path / "config.json"
    fix = (
        "give the path of a config.json, relative to the job file, or the name of a "
        "published model; `paceline catalog models` lists them"
    )
    return read_hf_config(path, where=where, fix=fix)


def read_hf_config(path: Path, *, where: str, fix: str) -> HfConfig:
    """The fields of a config.json.

    Raises:
        JobError: `M002`: it cannot be read, or is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        what = f"{path} cannot be read: {reason}"
        raise JobError.of(code="M002", what=what, where=where, fix=fix) from None
    return parse_hf_config(text, source=str(path), where=where)


def parse_hf_config(text: str, *, source: str, where: str) -> HfConfig:
    """The fields of a config.json from its text; `source` names the file and `where` its place in
    the job."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        values = f"{error.msg}, line {error.lineno} column {error.colno}"
    except RecursionError:
        values = "it is nested too deep"
    if not isinstance(values, dict):
        what = values if isinstance(values, str) else f"it holds a {type(values).__name__}"
        raise JobError.of(
            code="M002",
            what=f"{source} is not a JSON object: {what}",
            where=where,
            fix="give a config.json as Hugging Face writes it",
        )
    return HfConfig(values=values, source=source, where=where)


def _path(job: Job) -> Path:
    name = job.spec.model.hf_config
    assert name is not None, "the job names a config.json"
    return job.folder / name

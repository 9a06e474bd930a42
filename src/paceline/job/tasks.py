"""The tasks of `evaluate.tasks`: YAML files of lm-evaluation-harness.

Leaves out: tags of the harness's YAML (`!function`) and `include`, which are refused.
"""

import glob
import os
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import JobError, Problem
from paceline.job.job import Job
from paceline.job.sources import find_tokenizer


def read_tasks(job: Job) -> tuple[dict[str, Any], ...]:
    """The tasks of the job's files, as the harness takes them, with whole paths of their data; none
    where it names no file.

    Raises:
        JobError: `J014`, files cannot be read or are no tasks, or the model has no tokenizer.
    """
    problems: list[Problem] = []
    tasks: dict[str, dict[str, Any]] = {}
    for named in job.spec.evaluate.tasks:
        path = job.folder / os.path.expanduser(named)
        try:
            task = _task(path)
            if task["task"] in tasks:
                raise ValueError(f"another file has a task {task['task']} too")
            tasks[task["task"]] = task
        except ValueError as error:
            problems.append(_problem(job, f"{named} of evaluate.tasks: {error}", str(path)))
    if job.spec.evaluate.tasks and find_tokenizer(job) is None:
        problems.append(
            Problem(
                code="J014",
                what="evaluate.tasks needs a model with a tokenizer, and this one has none",
                where=job.where("evaluate.tasks"),
                fix="set model.tokenizer to a folder with tokenizer.json, or leave the tasks out",
            )
        )
    JobError.raise_for(problems)
    return tuple(tasks.values())


def _task(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: It is no task that can be done.
    """
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        # Of several lines; the first has what is wrong, the mark where.
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        wrong = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"it is no plain YAML{place}: {wrong}") from None
    if not isinstance(task, dict) or not isinstance(task.get("task"), str) or not task["task"]:
        raise ValueError("it has no name of a task: `task`")
    if "include" in task:
        raise ValueError("`include` is not read here: copy what it includes into this file")
    if not isinstance(task.get("dataset_path"), str):
        raise ValueError("it does not say what it reads: `dataset_path`, such as json")
    return _with_whole_paths(task, path.parent.resolve())


def _with_whole_paths(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The task with the paths of its data, which are relative to its file's folder.

    Raises:
        ValueError: There is no such file.
    """
    whole = dict(task)
    if task["dataset_path"].startswith((".", "~")):
        whole["dataset_path"] = _whole(task["dataset_path"], folder)
    settings = task.get("dataset_kwargs")
    if isinstance(settings, dict):
        places = ("data_files", "data_dir")
        whole["dataset_kwargs"] = {
            key: _whole(value, folder) if key in places else value
            for key, value in settings.items()
        }
    return whole


def _whole(value: Any, folder: Path) -> Any:
    """A path, or paths in lists or by split, below the folder.

    Raises:
        ValueError: There is no such file.
    """
    if isinstance(value, dict):
        return {key: _whole(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each, folder) for each in value]
    if not isinstance(value, str) or "://" in value:
        return value
    path = str(folder / os.path.expanduser(value))
    if not glob.glob(path, recursive=True):
        raise ValueError(f"there is no {path}, which its data_files, data_dir or dataset_path name")
    return path


def _problem(job: Job, what: str, where: str) -> Problem:
    return Problem(
        code="J014",
        what=what,
        where=f"{where} ({job.where('evaluate.tasks')})",
        fix="give YAML files of lm-evaluation-harness with `task`, `dataset_path` and, for local "
        "data, `dataset_kwargs: {data_files: {test: questions.jsonl}}` beside them",
    )

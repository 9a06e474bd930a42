"""Paceline's own job file: the problems that every other verb would end with."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from paceline.check.finding import Finding
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.planned import problem_finding
from paceline.errors import JobError
from paceline.job.job import ModelSpec
from paceline.job.length import uncounted
from paceline.job.load import parse_job

_MODEL = {one.name for one in fields(ModelSpec)}


def is_job(document: Marked) -> bool:
    """Whether a YAML mapping is a job file: it says a model in our words, and how to train it."""
    model = document.at("model")
    if model is None or not isinstance(model.value, dict) or document.at("apiVersion") is not None:
        return False
    return document.at("train") is not None and bool(_MODEL & set(model.value))


def check_job(path: str, text: str) -> Iterator[Finding]:
    """Every problem of the file, where it is."""
    try:
        parse_job(text, source=path, folder=Path("/"), count=uncounted)
    except JobError as error:
        for problem in error.problems:
            yield problem_finding(path, problem)

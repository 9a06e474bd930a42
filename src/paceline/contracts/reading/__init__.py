"""Read a job from one of two older JSON contracts, recognised by its keys.

The *engineer's* contract (`modelConfig`, `dataConfig`, `clusterConfig`, `trainingConfig`) asks for
a plan. The *coordinator's* training plan (`strategy`, `batch_configuration`, ...) is a finished
plan of somebody; its cluster and batch are taken over, and what contradicts itself in it is said.

What a contract does not say and a plan needs is assumed, and every assumption is a note.
docs/reference/contracts.md has both contracts field by field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.contracts.reading.coordinator import check_training_plan, job_of_training_plan
from paceline.contracts.reading.engineer import check_size, job_of_input_context
from paceline.contracts.reading.translation import ContractText, Translation
from paceline.errors import JobError, Problem
from paceline.job.job import Job, JobSpec
from paceline.job.load import parse_job

ContractKind = Literal["002", "004"]
"""`002`: the engineer's input context and output. `004`: the coordinator's training plan."""

_SIGNS: Mapping[ContractKind, tuple[frozenset[str], int]] = {
    "002": (frozenset({"modelConfig", "dataConfig", "clusterConfig", "trainingConfig"}), 1),
    "004": (frozenset({"strategy", "batch_configuration", "distributed_config"}), 2),
}
"""Keys that a contract is known by, and how many of them must be there."""


_JOB_KEYS = frozenset({*(field.name for field in fields(JobSpec)), "command"})
"""Keys of which a job file has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A job that was asked for in a contract."""

    kind: ContractKind
    job: Job

    notes: tuple[str, ...]
    """What was assumed, and what was read and not used: one sentence each."""

    findings: tuple[Problem, ...]
    """Where the contract contradicts itself or what exists. None of them stops the plan."""


def contract_kind(value: object) -> ContractKind | None:
    """Which contract a JSON value is, None when it is neither.

    >>> contract_kind({"modelConfig": {"size": "7B"}})
    '002'
    """
    if isinstance(value, Mapping):
        for kind, (keys, least) in _SIGNS.items():
            if len(keys & value.keys()) >= least:
                return kind
    return None


def load_contract(path: Path | str, overrides: Sequence[str] = ()) -> Contract | None:
    """The contract in a JSON file; None when the file is not a contract, so that it is a job file.

    Args:
        overrides: `key.key=value` over the job that comes of it, as for a job file.

    Raises:
        JobError: Every problem of the contract at once, in its own keys, each with the fix.
    """
    path = Path(path)
    text, value = _json_in(path)
    if contract_kind(value) is None and (value is None or _JOB_KEYS & value.keys()):
        return None
    return parse_contract(text, source=str(path), folder=path.resolve().parent, overrides=overrides)


def training_plan_in(path: Path) -> Mapping[str, Any]:
    """The training plan (004) in a file, as it stands there; empty where the file is none."""
    _, value = _json_in(path)
    return value if value is not None and contract_kind(value) == "004" else {}


def _json_in(path: Path) -> tuple[str, dict[str, Any] | None]:
    """A file's text, and the JSON mapping that it is; None where it is none or cannot be read:
    `load_job` says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, json.loads(text) if text.lstrip().startswith("{") else None
    except (OSError, ValueError, RecursionError):
        return "", None


def parse_contract(
    text: str, *, source: str, folder: Path, overrides: Sequence[str] = ()
) -> Contract:
    """Read a contract from JSON text; `source` names it in messages, `folder` is where its paths
    start."""
    value = json.loads(text)
    kind = contract_kind(value)
    if kind is None:
        raise JobError.of(
            code="J020",
            what="this JSON is neither a job nor one of the two contracts: "
            f"{'its keys are ' + ', '.join(list(value)[:8]) if value else 'it is empty'}",
            where=source,
            fix="give modelConfig, dataConfig and clusterConfig, or strategy, "
            "batch_configuration and distributed_config, or a job: `paceline init job.yaml`",
        )
    contract = ContractText(value=value, source=source, folder=folder)
    translate = job_of_input_context if kind == "002" else job_of_training_plan
    made: Translation = translate(contract, overrides)
    if made.problems:
        raise JobError(*made.problems)
    job = parse_job(_yaml(made.job), source=source, folder=folder, overrides=overrides)
    places = {
        key: line
        for key, line in job.lines.items()
        if line == 0  # what --set gave keeps its place; the others have no line in the contract
    }
    asked, train = made.length, job.spec.train
    holds = asked and (asked.steps, asked.global_batch) == (train.steps, train.global_batch)
    length = asked if holds else job.length
    return Contract(
        kind=kind,
        job=replace(job, lines=places, length=length),
        notes=tuple(made.notes),
        findings=tuple(
            check_training_plan(value, source) if kind == "004" else check_size(value, job, source)
        ),
    )


def _yaml(job: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(job), sort_keys=False)
    return text

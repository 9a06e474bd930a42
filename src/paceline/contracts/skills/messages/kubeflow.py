"""The Kubeflow pipeline executor's contract."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from paceline.job.section import Positive, section

Action = Literal["compile", "run", "schedule", "list", "get-run", "delete"]
RunStatus = Literal[
    "pending", "running", "succeeded", "failed", "skipped", "canceling", "canceled", "paused"
]
"""The published five, and the three that Kubeflow's v2beta1 API has as well."""

_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_FIELDS: Mapping[str, tuple[int, int, Mapping[str, int]]] = {
    "second": (0, 59, {}),
    "minute": (0, 59, {}),
    "hour": (0, 23, {}),
    "day of the month": (1, 31, {}),
    "month": (1, 12, {name: place for place, name in enumerate(_MONTHS, start=1)}),
    "day of the week": (0, 6, {name: place for place, name in enumerate(_DAYS)}),
}
"""Field -> lowest value, highest value, names: robfig/cron 1.2, which Kubeflow Pipelines reads it
with (`backend/src/crd/controller/scheduledworkflow/util/cron_schedule.go`)."""


def _check_cron(value: str) -> str:
    fields = value.split()
    if len(fields) not in (5, 6):
        raise ValueError(
            f"cron of Kubeflow has 6 fields, seconds first, and this has {len(fields)}: "
            "`0 30 2 * * *` is 2:30 every night"
        )
    for (name, (low, high, names)), field in zip(
        list(_FIELDS.items())[6 - len(fields) :], fields, strict=True
    ):
        for part in field.split(","):
            if not _is_range(part, low, high, names):
                raise ValueError(
                    f"`{part}` is no {name} of cron: {low} to {high}, `*`, `a-b` or `*/n`"
                    + (f", or {', '.join(names)}" if names else "")
                )
    return value


def _is_range(part: str, low: int, high: int, names: Mapping[str, int]) -> bool:
    """Whether it is `*`, `a` or `a-b`, each perhaps with `/n`."""
    form = re.fullmatch(r"(?:[*?]|([0-9]+|[A-Za-z]+)(?:-([0-9]+|[A-Za-z]+))?)(?:/([0-9]+))?", part)
    if form is None or (form[3] is not None and int(form[3]) == 0):
        return False
    ends = [
        names.get(each.upper(), int(each) if each.isdecimal() else -1)
        for each in form.groups()[:2]
        if each is not None
    ]
    return low <= min(ends, default=low) and ends == sorted(ends) and max(ends, default=low) <= high


_Cron = Annotated[
    str,
    AfterValidator(_check_cron),
    WithJsonSchema({"type": "string", "examples": ["0 30 2 * * *"]}),
]


@section
class PipelineConfig:
    """The pipeline."""

    name: str | None = None
    """What it is called where it is uploaded; left out, the pipeline's own name."""

    description: str | None = None
    """For people."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """Defaults of its parameters, which `runConfig.arguments` go over."""


@section
class RunConfig:
    """One run."""

    experimentName: str = "Default"
    """What the run belongs to; made where it is not there."""

    runName: str | None = None
    """For people; left out, the pipeline's name and the time."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of the pipeline's parameters."""

    runId: str | None = None
    """Addition: which run `get-run` and `delete` mean."""

    wait: bool = False
    """Addition: `run` at an API answers when the run has ended, and not when it has begun."""


@section
class ScheduleConfig:
    """A run that comes again."""

    cron: _Cron
    """When. Kubeflow's cron has six fields, the first for seconds; with five, 0 is put before
    them."""

    maxConcurrency: Annotated[Positive, Field(le=10)] = 1
    """Runs at the same time."""

    enabled: bool = True
    """Whether it begins at once."""


@section
class Request:
    """What the Kubeflow pipeline executor is asked."""

    action: Action
    """What to do."""

    pipelinePath: str | None = None
    """A Python file with one `@dsl.pipeline`, or a compiled `.yaml`. For `compile`, `run` and
    `schedule`."""

    pipelineConfig: PipelineConfig = Field(default_factory=PipelineConfig)
    """The pipeline."""

    runConfig: RunConfig = Field(default_factory=RunConfig)
    """The run."""

    scheduleConfig: ScheduleConfig | None = None
    """For `schedule`."""

    dryRun: bool = False
    """Addition: `run` and `schedule` answer with what they would send, and send nothing. It needs
    no endpoint."""

    endpoint: str | None = None
    """Addition: URL of the Kubeflow Pipelines API, or `local`: runs are processes of this machine,
    kept in `pipeline_runs/`. Left out, KFP_ENDPOINT; its token is KFP_TOKEN, in the environment
    alone."""


@section
class Artifact:
    """What a run made."""

    name: str
    """Step and output: `train.checkpoint`."""

    uri: str
    """Where it is."""

    type: str
    """Kubeflow's word: `system.Model`."""


@section
class RunSummary:
    """A row of `list`."""

    runId: str
    """By which `get-run` and `delete` know it."""

    runName: str
    """For people."""

    runStatus: RunStatus
    """How far it is."""


@section
class Sent:
    """What changes something at the API."""

    method: Literal["POST"]
    """HTTP's word."""

    url: str
    """Where it goes; without an endpoint, its path."""

    body: dict[str, Any]
    """The whole body."""


@section
class Answer:
    """What the Kubeflow pipeline executor answers."""

    status: Literal["success", "error", "running"]
    """How the action ended: `running` where a run was begun and goes on."""

    action: Action
    """What was asked."""

    pipelineId: str | None = None
    """ID of the pipeline that was uploaded; for `compile`, the path of the compiled file."""

    runId: str | None = None
    """ID of the run; for `schedule`, of the recurring run."""

    runStatus: RunStatus | None = None
    """How far it is."""

    artifacts: list[Artifact] = Field(default_factory=list)
    """What the run made, as far as it is known here."""

    dashboardUrl: str | None = None
    """Where a person sees it."""

    runs: list[RunSummary] | None = None
    """Addition: what `list` found, newest first."""

    sends: list[Sent] | None = None
    """Addition: what a dry run would send, in order. The experiment is made only where it is not
    there, and its ID, here `EXPERIMENT_ID`, is the API's."""

    message: str | None = None
    """Addition: why the status is `error`."""

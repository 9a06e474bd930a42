"""The Kubeflow pipeline executor's contract: at a Kubeflow Pipelines API, or on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.contracts.skills import need
from paceline.contracts.skills.kfp_api import Api, show
from paceline.contracts.skills.kfp_here import Here
from paceline.contracts.skills.kfp_program import PipelineError, compile_pipeline
from paceline.contracts.skills.messages.kubeflow import Answer, Request
from paceline.contracts.skills.words import problem
from paceline.errors import JobError, Problem

_NEEDS_PIPELINE = ("compile", "run", "schedule")
_SENDS = ("run", "schedule")
_NEEDS_RUN = ("get-run", "delete")


def run(request: Request, folder: Path) -> Answer:
    """Do what is asked.

    Raises:
        JobError: `H033`, something is missing or contradicts itself; `H032`, kfp is not installed.
    """
    endpoint = request.endpoint or os.environ.get("KFP_ENDPOINT")
    JobError.raise_for(_check(request, folder, endpoint))
    need("kfp", '"kfp>=2.17,<2.18"')
    try:
        return _do(request, folder, endpoint)
    except PipelineError as error:
        return Answer(status="error", action=request.action, message=str(error))


def _check(request: Request, folder: Path, endpoint: str | None) -> Iterator[Problem]:
    action, path = request.action, request.pipelinePath
    if action in _NEEDS_PIPELINE:
        if path is None:
            yield problem("pipelinePath", f"{action} needs a pipeline", "name its file")
        elif not (folder / path).is_file():
            yield problem("pipelinePath", f"there is no file {path}", "name the pipeline's file")
        elif Path(path).suffix not in (".py", ".yaml", ".yml"):
            what = f"{path} is neither Python nor YAML"
            yield problem("pipelinePath", what, "name a .py with @dsl.pipeline, or compiled YAML")
        elif Path(path).suffix != ".py" and action == "run" and endpoint == "local":
            what = "a compiled pipeline cannot run on this machine"
            yield problem("pipelinePath", what, "name the .py that it was compiled from")
    if action in _NEEDS_RUN and request.runConfig.runId is None:
        yield problem("runConfig.runId", f"{action} needs the run's id", "take it from `list`")
    if action == "schedule" and request.scheduleConfig is None:
        fix = 'add it: "scheduleConfig": {"cron": "0 0 2 * * *"} is 2:00 every night'
        yield problem("scheduleConfig", "schedule needs `scheduleConfig`", fix)
    if action == "schedule" and endpoint == "local":
        what = "nothing on this machine starts runs by the clock"
        yield problem("endpoint", what, "name the URL of a Kubeflow Pipelines API")
    if request.dryRun and (action not in _SENDS or endpoint == "local"):
        what = f"{'a run here' if action in _SENDS else action} sends nothing that could be shown"
        yield problem("dryRun", what, "leave it out, or run or schedule at an API")
    if action != "compile":
        if endpoint is None and not request.dryRun:
            yield problem(
                "endpoint",
                "no Kubeflow Pipelines API is named",
                'set KFP_ENDPOINT or "endpoint" to its URL, or "endpoint": "local" to run here'
                + ('; "dryRun": true shows what would be sent' if action in _SENDS else ""),
            )
        elif endpoint and endpoint != "local" and not endpoint.startswith(("http://", "https://")):
            yield problem("endpoint", f"{endpoint} is no URL", "https://... or local")


def _do(request: Request, folder: Path, endpoint: str | None) -> Answer:
    action, config = request.action, request.runConfig
    package = None
    if action in _NEEDS_PIPELINE and not (action == "run" and endpoint == "local"):
        assert request.pipelinePath is not None
        package = compile_pipeline(folder / request.pipelinePath, request.pipelineConfig)
    if action == "compile":
        return Answer(status="success", action=action, pipelineId=str(package))
    if request.dryRun:
        assert package is not None
        return show(request, package, endpoint)
    assert endpoint is not None
    place = Here(folder) if endpoint == "local" else Api(endpoint, os.environ.get("KFP_TOKEN"))
    if action == "list":
        return Answer(status="success", action=action, runs=place.list_runs(config.experimentName))
    if action == "delete":
        assert config.runId is not None
        place.delete(config.runId)
        return Answer(status="success", action=action, runId=config.runId)
    if action == "get-run":
        assert config.runId is not None
        return place.get(config.runId, action)
    if isinstance(place, Here):
        return place.run(request)
    assert package is not None
    return place.begin(request, package)

"""A Kubeflow Pipelines API (v2beta1), through kfp's own client."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError as RefusedError
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import yaml

from paceline.contracts.skills.kfp_program import PipelineError
from paceline.contracts.skills.messages.kubeflow import (
    Action,
    Answer,
    Request,
    RunStatus,
    RunSummary,
    Sent,
)

_T = TypeVar("_T")

_STATES: dict[str, RunStatus] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "SKIPPED": "skipped",
    "FAILED": "failed",
    "CANCELING": "canceling",
    "CANCELED": "canceled",
    "PAUSED": "paused",
}
"""V2beta1RuntimeState; another one is not there yet."""

_WAIT_S = 7 * 24 * 3600
"""Longest that `wait` waits."""

_PATIENCE_S = 20.0
"""For the first answer. A guess."""

_NEWEST = 100
"""Runs that `list` shows."""


class Api:
    """One API. Nothing is asked before a method is called."""

    def __init__(self, endpoint: str, token: str | None, *, is_there: bool = True) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._is_there = is_there

    def begin(self, request: Request, package: Path) -> Answer:
        """What `run` and `schedule` ask for.

        Raises:
            PipelineError: The API refuses; the file is no compiled pipeline; or it has no
                parameter of that name, which Kubeflow takes in silence.
        """
        known = _parameters(package)
        given = request.pipelineConfig.parameters | request.runConfig.arguments
        if unknown := sorted(set(given) - set(known)):
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise PipelineError(f"the pipeline has no parameter {', '.join(unknown)}: {has}")
        return (self.schedule if request.action == "schedule" else self.run)(request, package)

    def run(self, request: Request, package: Path) -> Answer:
        """Begin a run; with `wait`, see it to its end."""
        name = f"{package.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = request.runConfig
        client = self._client()
        begun = self._ask(
            lambda: client.create_run_from_pipeline_package(
                str(package),
                arguments=request.pipelineConfig.parameters | config.arguments,
                run_name=config.runName or name,
                experiment_name=config.experimentName,
            )
        )
        if config.wait:
            self._ask(lambda: client.wait_for_run_completion(begun.run_id, timeout=_WAIT_S))
        return self.get(begun.run_id, "run")

    def schedule(self, request: Request, package: Path) -> Answer:
        """A recurring run of the pipeline."""
        config, when = request.runConfig, request.scheduleConfig
        assert when is not None
        fields = when.cron.split()
        cron = " ".join(fields if len(fields) == 6 else ["0", *fields])
        client = self._client()
        experiment = self._ask(lambda: client.create_experiment(config.experimentName))
        made = self._ask(
            lambda: client.create_recurring_run(
                experiment_id=experiment.experiment_id,
                job_name=config.runName or package.stem,
                cron_expression=cron,
                max_concurrency=when.maxConcurrency,
                enabled=when.enabled,
                pipeline_package_path=str(package),
                params=request.pipelineConfig.parameters | config.arguments,
            )
        )
        return Answer(
            status="success",
            action="schedule",
            runId=made.recurring_run_id,
            dashboardUrl=f"{self._endpoint}/#/recurringrun/details/{made.recurring_run_id}",
        )

    def get(self, run_id: str, action: Action) -> Answer:
        """A run as it is now."""
        client = self._client()
        found = self._ask(lambda: client.get_run(run_id))
        status = _STATES.get(found.state or "", "pending")
        error = getattr(found.error, "message", None)
        goes_on = action == "run" and status in ("pending", "running", "paused")
        failed = action == "run" and status in ("failed", "canceled")
        return Answer(
            status="running" if goes_on else "error" if failed else "success",
            action=action,
            runId=found.run_id,
            runStatus=status,
            dashboardUrl=f"{self._endpoint}/#/runs/details/{found.run_id}",
            message=error or (f"the run has {status}" if failed else None),
        )

    def list_runs(self, experiment: str) -> list[RunSummary]:
        """Runs of an experiment, the newest first."""
        client = self._client()
        place = self._ask(lambda: client.get_experiment(experiment_name=experiment))
        found = self._ask(
            lambda: client.list_runs(
                experiment_id=place.experiment_id, page_size=_NEWEST, sort_by="created_at desc"
            )
        )
        return [
            RunSummary(
                runId=each.run_id,
                runName=each.display_name,
                runStatus=_STATES.get(each.state or "", "pending"),
            )
            for each in found.runs or []
        ]

    def delete(self, run_id: str) -> None:
        """The run's record; one that goes on is ended first."""
        client = self._client()
        found = self._ask(lambda: client.get_run(run_id))
        if _STATES.get(found.state or "") in ("pending", "running", "paused"):
            self._ask(lambda: client.terminate_run(run_id))
        self._ask(lambda: client.delete_run(run_id))

    def _client(self) -> Any:
        from kfp import Client

        if self._is_there:
            self._knock()
        return self._ask(lambda: Client(host=self._endpoint, existing_token=self._token))

    def _knock(self) -> None:
        """One plain question first: kfp's client asks five times, and forgets what was answered.

        Raises:
            PipelineError: Nobody answers, or it refuses.
        """
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        url = f"{self._endpoint}/apis/v2beta1/healthz"
        try:
            with urlopen(HttpRequest(url, headers=headers), timeout=_PATIENCE_S) as answer:
                answer.read()
        except RefusedError as error:
            raise PipelineError(_refusal(self._endpoint, error.code, str(error.reason))) from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise PipelineError(f"{self._endpoint} is not reached: {reason}") from None

    def _ask(self, question: Callable[[], _T]) -> _T:
        """
        Raises:
            PipelineError: The API is not reached, or refuses; in its words.
        """
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return question()
        except ApiException as error:
            said = str(error.body or error.reason or "")
            raise PipelineError(_refusal(self._endpoint, error.status, said)) from None
        except HTTPError as error:
            raise PipelineError(f"{self._endpoint} is not reached: {error}") from None
        except (ValueError, TimeoutError, RuntimeError) as error:
            raise PipelineError(f"{self._endpoint}: {error}") from None


_NOWHERE = "http://kfp.invalid"
"""In place of an endpoint that nobody named: RFC 2606, section 2."""

_IDS = {"experiments": "experiment_id", "runs": "run_id", "recurringruns": "recurring_run_id"}
"""Last word of a path -> which ID the API gives to what is sent there."""


def show(request: Request, package: Path, endpoint: str | None) -> Answer:
    """What `begin` would send, as kfp's client writes it; nothing is sent or asked."""
    from unittest.mock import patch

    from kfp_server_api.rest import RESTClientObject, RESTResponse
    from urllib3 import HTTPResponse

    sends: list[Sent] = []

    def answer(_: Any, method: str, url: str, *__: Any, body: Any = None, **___: Any) -> Any:
        """As an API whose every name is new."""
        word, given = url.rpartition("/")[2], {}
        if method == "POST":
            given = body | {_IDS[word]: _IDS[word].upper()}
            shown = url if endpoint else urlsplit(url).path
            sends.append(Sent(method="POST", url=shown, body=json.loads(json.dumps(body))))
        text, headers = json.dumps(given).encode(), {"Content-Type": "application/json"}
        return RESTResponse(HTTPResponse(body=text, status=200, headers=headers))

    api = Api(endpoint or _NOWHERE, None, is_there=False)
    with patch.object(RESTClientObject, "request", answer):
        api.begin(replace(request, runConfig=replace(request.runConfig, wait=False)), package)
    return Answer(status="success", action=request.action, sends=sends)


def _refusal(endpoint: str, status: int, said: str) -> str:
    why = {401: "it does not know you: KFP_TOKEN", 403: "you may not"}.get(status)
    return f"{endpoint} refuses ({status}): {why or ' '.join(said.split())[:300]}"


def _parameters(package: Path) -> list[str]:
    """Names of a compiled pipeline's parameters."""
    try:
        spec = next(iter(yaml.safe_load_all(package.read_text(encoding="utf-8"))))
        return list(spec["root"].get("inputDefinitions", {}).get("parameters", {}))
    except (yaml.YAMLError, UnicodeDecodeError, StopIteration, KeyError, TypeError, AttributeError):
        raise PipelineError(f"{package.name} is no compiled pipeline") from None

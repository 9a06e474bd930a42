"""MLflow: a tracking server, or a database on this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.launch.sinks import SinkRefused, Told

_STEP = "run/step"
"""Metric that every step has: the newest one says which steps MLflow has already."""

_EVALUATED = "eval/loss"
_OF_MACHINES = ("gpu/", "host/")

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""In one request. Source: MLflow's REST API, `runs/log-batch`."""

_LONGEST_PARAM = 500
"""Characters; older servers take no more."""

_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""What MLflow makes of HTTP's 401 and 403."""


@contextmanager
def open_sink(told: Told) -> Iterator["_Mlflow"]:
    """The sink. The run is found by its tag, so that a part of it that follows goes to it too."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=told.settings["uri"])
    try:
        run_id = _open_run(client, told)
    except MlflowException as error:
        if error.error_code in _REFUSALS:
            raise SinkRefused(f"{error.error_code}: {error.message}") from None
        raise
    sink = _Mlflow(client, run_id, Metric)
    try:
        yield sink
        sink.flush()
    finally:
        client.set_terminated(run_id)


def _open_run(client: Any, told: Told) -> str:
    """The id of the run, which is there already or made."""
    from mlflow.entities import Param

    name = told.settings["experiment"]
    experiment = client.get_experiment_by_name(name)
    place = experiment.experiment_id if experiment else client.create_experiment(name)
    known = client.search_runs([place], f"tags.`paceline.id` = '{told.id}'")
    if known:
        run_id = known[0].info.run_id
        client.set_terminated(run_id, "RUNNING")
    else:
        tags = {"paceline.id": told.id}
        run_id = client.create_run(place, run_name=told.run.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in told.job.items()]
        for at in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[at : at + _MOST_PARAMS])
    print(f"experiment {name}, run {run_id}")
    return str(run_id)


class _Mlflow:
    def __init__(self, client: Any, run_id: str, metric: Any) -> None:
        self._client, self._run_id, self._metric = client, run_id, metric
        self._rows: list[Any] = []
        self._has: dict[str, int] = {}

    def begin(self, done: int) -> None:
        """What a sink that was killed had sent beyond its mark is left out."""
        for name in (_STEP, _EVALUATED):
            history = self._client.get_metric_history(self._run_id, name)
            self._has[name] = max((row.step for row in history), default=-1)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        rows = dict(values)
        if not all(name.startswith(_OF_MACHINES) for name in values):
            kind = _EVALUATED if _EVALUATED in values else _STEP
            if step <= self._has[kind]:
                return
            if kind == _STEP:
                rows[_STEP] = float(step)
        if len(self._rows) + len(rows) > _MOST_METRICS:
            self.flush()
        self._rows += [self._metric(n, v, round(1000 * at), step) for n, v in rows.items()]

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        self._client.log_artifact(self._run_id, str(file), f"media/{name}")

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._client.log_batch(self._run_id, metrics=rows)

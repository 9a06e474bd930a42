"""OpenTelemetry: gauges to a collector, by OTLP over HTTP in JSON.

The form is that of https://opentelemetry.io/docs/specs/otlp: `POST ENDPOINT/v1/metrics`. Every
number has the time of its step.
"""

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.launch.notify import Stays
from paceline.launch.sinks import Told
from paceline.record.metric_names import METRICS

_MOST_POINTS = 2000
"""In one request. A guess: some 400 kB."""

_ANSWER_S = 10.0
"""Source: the default of OTEL_EXPORTER_OTLP_TIMEOUT."""

_LONGEST_PAUSE_S = 30.0

_TRANSIENT = (429, 502, 503, 504)
"""Source: OTLP's specification, retryable response codes."""

_UNITS = {
    "share": "1",
    "": "1",
    "bytes": "By",
    "bytes/s": "By/s",
    "tokens/s": "{token}/s",
    "°C": "Cel",
    "USD": "{USD}",
    "USD/h": "{USD}/h",
}
"""As UCUM writes them, where it is not as we do."""


@contextmanager
def open_sink(told: Told) -> Iterator["_Otel"]:
    endpoint = told.settings["endpoint"] or os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    given = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (pair.partition("=") for pair in given.split(",") if "=" in pair)
    headers = {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}
    sink = _Otel(f"{endpoint.rstrip('/')}/v1/metrics", headers, told)
    yield sink
    sink.flush()


class _Otel:
    def __init__(self, url: str, headers: Mapping[str, str], told: Told) -> None:
        self._url, self._headers = url, {**headers, "Content-Type": "application/json"}
        about = {"service.name": "paceline", "paceline.run": told.run.name, "paceline.id": told.id}
        self._resource = [{"key": k, "value": {"stringValue": v}} for k, v in about.items()]
        self._points: dict[str, list[dict[str, Any]]] = {}
        self._num_points = 0

    def begin(self, done: int) -> None:
        """A repeated point has its own time, or the time and value that it had."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        if self._num_points > _MOST_POINTS:
            self.flush()
        for name, value in {**values, "run/step": float(step)}.items():
            point = {"timeUnixNano": str(int(at * 1e9)), "asDouble": value}
            self._points.setdefault(name, []).append(point)
            self._num_points += 1

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        """OpenTelemetry has numbers only."""

    def flush(self) -> None:
        """Returns when the collector has taken everything; waits while it is not there."""
        if not self._points:
            return
        metrics = [_gauge(name, points) for name, points in self._points.items()]
        scope = [{"scope": {"name": "paceline"}, "metrics": metrics}]
        about = {"attributes": self._resource}
        self._send({"resourceMetrics": [{"resource": about, "scopeMetrics": scope}]})
        self._points, self._num_points = {}, 0

    def _send(self, content: object) -> None:
        pause_s = 1.0
        request = urllib.request.Request(
            self._url, json.dumps(content).encode(), self._headers, method="POST"
        )
        while True:
            try:
                with _OPENER.open(request, timeout=_ANSWER_S) as answer:
                    _show_refused(answer.read())
                return
            except urllib.error.HTTPError as error:
                if error.code not in _TRANSIENT:
                    raise
                why = str(error)
            except OSError as error:
                why = str(error)
            print(f"the collector does not take it: {why}; trying again in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _gauge(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    row = METRICS.get(name)
    unit, text = (row.unit, row.text) if row is not None else ("", "")
    return {
        "name": "paceline." + name.replace("/", "."),
        "unit": _UNITS.get(unit, unit),
        "description": text,
        "gauge": {"dataPoints": points},
    }


def _show_refused(answer: bytes) -> None:
    try:
        refused = json.loads(answer or b"{}").get("partialSuccess") or {}
    except ValueError:
        return
    if refused.get("rejectedDataPoints") or refused.get("errorMessage"):
        print(f"the collector refused a part: {refused}")


_OPENER = urllib.request.build_opener(Stays)
"""The headers may hold a credential, which no other host is to see."""

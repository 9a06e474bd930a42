"""A page for Prometheus: the newest numbers of a run, as text, for whoever asks.

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats (0.0.4).
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline.launch.sinks import Told
from paceline.record.metric_names import METRICS

FIRST_PORT = 9464
"""Source: what OpenTelemetry's exporter for Prometheus listens on by default."""

_PORTS_TRIED = 100


@contextmanager
def open_sink(told: Told) -> Iterator["_Prometheus"]:
    """The sink, which serves until it is closed."""
    sink = _Prometheus(told.run.name)
    server = _bound(told.settings["host"], told.settings["port"], sink)
    print(f"http://{told.settings['host']}:{server.server_port}/metrics", flush=True)
    threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
    try:
        yield sink
    finally:
        server.shutdown()
        server.server_close()


class _Prometheus:
    def __init__(self, run: str) -> None:
        self._label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._newest: dict[str, float] = {}

    def begin(self, done: int) -> None:
        """Nothing is kept."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Numbers of a step in place of those of the one before."""
        # One assignment: a request reads either the old numbers or the new ones.
        self._newest = {**self._newest, **values, "run/step": float(step)}

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        """Prometheus has numbers only."""

    def flush(self) -> None:
        """Nothing is kept."""

    def page(self) -> str:
        """The newest numbers in Prometheus' text format."""
        lines = []
        for name, value in self._newest.items():
            shown = "paceline_" + re.sub(r"[^A-Za-z0-9_]", "_", name)
            if (row := METRICS.get(name)) is not None:
                lines.append(f"# HELP {shown} {row.text}")
            lines.append(f"# TYPE {shown} gauge")
            lines.append(f'{shown}{{run="{self._label}"}} {value!r}')
        return "\n".join(lines) + "\n"


def _bound(host: str, port: int | str, sink: _Prometheus) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            content = sink.page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """A scrape is no news."""

    if port != "auto":
        return ThreadingHTTPServer((host, int(port)), Handler)
    for tried in range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED):
        try:
            return ThreadingHTTPServer((host, tried), Handler)
        except OSError:
            continue
    return ThreadingHTTPServer((host, 0), Handler)

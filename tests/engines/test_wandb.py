"""The W&B sink with W&B's own client, against a stand-in for its API on this machine.

What W&B's client (wandb-core) uploads is looked at as it arrives: rows of history by their offset,
the configuration, the id of the run. What W&B's server makes of it is not tested: it needs an
account, or Docker.
"""

import gzip
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.engines.test_mlflow import ROOT, run
from tests.launch.test_sinks import append, evaluation, step

__all__ = ["run"]  # the fixture


class Api:
    """One run, as W&B's client uploads it."""

    def __init__(self) -> None:
        self.address = ""
        self.history: list[dict[str, Any]] = []
        self.bucket: dict[str, Any] | None = None
        self.ids: set[str] = set()
        self.keys: set[str] = set()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What W&B would answer, as far as its client needs it."""
        if path.endswith("/graphql"):
            return {"data": self._data(body.get("operationName"), body.get("variables") or {})}
        for file, part in (body.get("files") or {}).items():
            if file == "wandb-history.jsonl":
                self.history[part["offset"] :] = [json.loads(line) for line in part["content"]]
        return {"exitcode": None, "limits": {}}

    def _data(self, name: str | None, given: dict[str, Any]) -> dict[str, Any]:
        if name == "UpsertBucket":
            self.ids.add(given["name"])
            kept = self.bucket or {"displayName": None}
            self.bucket = {
                "id": "1",
                "name": given["name"],
                "displayName": given["displayName"] or kept["displayName"],
                "config": given["config"],
                "sweepName": None,
                "project": {"id": "2", "name": "paceline", "entity": {"id": "3", "name": "us"}},
            }
        files = [
            {"name": each, "uploadUrl": f"{self.address}/upload/{each}"}
            for each in given.get("files") or []
        ]
        return {
            "viewer": {"id": "4", "entity": "us", "username": "us", "flags": "{}"},
            "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "features": []},
            "model": {"bucket": self._resumed()},
            "upsertBucket": {"bucket": self.bucket, "inserted": len(self.history) == 0},
            "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files},
        }

    def _resumed(self) -> dict[str, Any] | None:
        if self.bucket is None:
            return None
        return self.bucket | {
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]]),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(self.history[-1] if self.history else {}),
            "wandbConfig": json.dumps({"t": 1}),
            "tags": [],
        }

    def rows(self, name: str) -> list[tuple[int, float]]:
        """Step and value of every row that has this number."""
        return [(row["_step"], row[name]) for row in self.history if name in row]


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            made.keys.add(self.headers.get("Authorization", ""))
            is_ours = self.path.endswith(("/graphql", "/file_stream"))
            said = made.answer(self.path, json.loads(content)) if is_ours else {}
            text = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_PUT = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] clients hang up
    made.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def environment(api: Api, folder: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT}/src",
        "WANDB_BASE_URL": api.address,
        "WANDB_API_KEY": "a" * 40,
        "HOME": str(folder),
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def sink(python: Path, run: Path, api: Api, mode: str) -> Iterator[None]:
    """The sink's own process; leaving this says that the run is over."""
    settings = {"wandb": {"project": "paceline", "entity": None, "mode": mode}, "every": 1}
    process = subprocess.Popen(
        [
            *(python, "-m", "paceline.launch.sinks.supervisor", str(run)),
            json.dumps(settings | {"wanted": ["wandb"]}),
        ],
        stdin=subprocess.PIPE,
        env=environment(api, run.parent),
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


def steps(run: Path, *numbers: int, generation: int = 1) -> None:
    append(run, "metrics.jsonl", *(step(number, generation=generation) for number in numbers))


@pytest.mark.engine("wandb", ran="online by wandb's client, and a resumed run, to a stand-in API")
def test_s0_21_wandbs_client_uploads_every_step_once_and_a_resume_to_the_same_run(
    python_with, run, api
):
    python = python_with("wandb")
    steps(run, 1, 2, 3)
    append(run, "events.jsonl", evaluation(2, 8.0))
    with sink(python, run, api, "online"):
        pass
    steps(run, 3, 4, generation=2)
    with sink(python, run, api, "online"):
        pass
    assert api.rows("train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert api.rows("eval/loss") == [(2, 8.0)]
    assert len(api.ids) == 1
    assert api.bucket is not None
    assert api.bucket["displayName"] == "run"
    log = (run / "logs" / "sink-wandb.log").read_text()
    assert "Traceback" not in log
    assert "a" * 40 not in log


@pytest.mark.engine("wandb", ran="offline files, uploaded by wandb sync to a stand-in API")
def test_s0_21_wandb_sync_reads_the_offline_files(python_with, run, api):
    python = python_with("wandb")
    steps(run, 1, 2)
    append(run, "events.jsonl", evaluation(2, 8.0))
    with sink(python, run, api, "offline"):
        pass
    assert api.history == []  # nothing left the machine
    assert api.keys == set()
    (folder,) = (run / "wandb").glob("offline-run-*")
    done = subprocess.run(
        [python, "-m", "wandb", "sync", str(folder)],
        cwd=run.parent,
        env=environment(api, run.parent),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Finished syncing" in done.stdout + done.stderr
    assert api.rows("train/loss") == [(1, 1.0), (2, 2.0)]
    assert api.rows("eval/loss") == [(2, 8.0)]
    assert api.bucket is not None
    assert json.loads(api.bucket["config"])["train.optimizer"]["value"] == "adamw"

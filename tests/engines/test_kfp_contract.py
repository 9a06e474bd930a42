"""The Kubeflow pipeline executor's contract: at an API that a test plays, and on this machine."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

SOURCE = Path(__file__).parents[2] / "src"
PIPELINE = """
from kfp import dsl


@dsl.component(install_kfp_package=False)
def double(number: int) -> int:
    if number < 0:
        raise ValueError("no numbers below 0")
    return 2 * number


@dsl.component(install_kfp_package=False)
def keep(number: int, kept: dsl.Output[dsl.Dataset]):
    with open(kept.path, "w") as file:
        file.write(str(number))


@dsl.pipeline(name="doubling")
def pipeline(number: int = 3):
    keep(number=double(number=number).output)
"""


class PlayedApi(ThreadingHTTPServer):
    """Kubeflow Pipelines' v2beta1 API, as far as the contract asks it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiments = {"e0": "Default"}
        self.runs: dict[str, dict] = {}
        self.recurring: list[dict] = []
        self.refuses: int | None = None
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: PlayedApi

    def answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_one(self, method: str) -> None:
        parts = urlsplit(self.path)
        words = parts.path.removeprefix("/apis/v2beta1/").split("/")
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") if length else {}
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            return self.answer({"message": "no"}, self.server.refuses)
        match method, words:
            case "GET", ["healthz"]:
                return self.answer({"multi_user": False})
            case "GET", ["experiments"]:
                wanted = parse_qs(parts.query).get("filter", [""])[0]
                rows = [
                    {"experiment_id": key, "display_name": name}
                    for key, name in self.server.experiments.items()
                    if not wanted or json.dumps(name)[1:-1] in wanted
                ]
                return self.answer({"experiments": rows} if rows else {})
            case "POST", ["experiments"]:
                key = f"e{len(self.server.experiments)}"
                self.server.experiments[key] = body["display_name"]
                return self.answer({"experiment_id": key, "display_name": body["display_name"]})
            case "GET", ["experiments", key]:
                name = self.server.experiments[key]
                return self.answer({"experiment_id": key, "display_name": name})
            case "POST", ["runs"]:
                key = f"r{len(self.server.runs)}"
                self.server.runs[key] = body | {"run_id": key, "state": "RUNNING"}
                return self.answer(self.server.runs[key])
            case "GET", ["runs"]:
                rows = list(reversed(self.server.runs.values()))
                return self.answer({"runs": rows})
            case "GET", ["runs", key] if key in self.server.runs:
                return self.answer(self.server.runs[key])
            case "POST", ["runs", key]:
                self.server.runs[key.removesuffix(":terminate")]["state"] = "CANCELING"
                return self.answer({})
            case "DELETE", ["runs", key] if key in self.server.runs:
                del self.server.runs[key]
                return self.answer({})
            case "POST", ["recurringruns"]:
                self.server.recurring.append(body)
                return self.answer(body | {"recurring_run_id": "s0"})
        return self.answer({"message": f"{method} {self.path} not found"}, 404)

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[PlayedApi]:
    server = PlayedApi()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(python_with, tmp_path):
    """`ask(action="run", ...)`: exit code and answer."""
    python = python_with("kfp")
    (tmp_path / "pipeline.py").write_text(PIPELINE)

    def ask(**request):
        environment = {key: each for key, each in os.environ.items() if not key.startswith("KFP")}
        environment |= {"PYTHONPATH": str(SOURCE), "KFP_TOKEN": "held-secret"}
        done = subprocess.run(
            [python, "-m", "paceline", "contract", "kubeflow-pipeline-executor"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=120,
            check=False,
        )
        assert "held-secret" not in done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    return ask


@pytest.mark.engine("kfp", validated="the contract: compile")
def test_compile_writes_the_pipeline_with_its_name_and_values(ask, tmp_path):
    config = {"name": "nightly", "description": "every night", "parameters": {"number": 7}}
    code, answer = ask(action="compile", pipelinePath="pipeline.py", pipelineConfig=config)
    assert (code, answer["status"]) == (0, "success")
    pipeline = yaml.safe_load(Path(answer["pipelineId"]).read_text())
    assert pipeline["pipelineInfo"] == {"name": "nightly", "description": "every night"}
    given = pipeline["root"]["inputDefinitions"]["parameters"]["number"]
    assert given["defaultValue"] == 7


@pytest.mark.engine("kfp", ran="the contract on this machine: run, list, get-run, delete")
def test_a_run_on_this_machine_is_kept_listed_and_deleted(ask, tmp_path):
    here = {"endpoint": "local"}
    arguments = {"arguments": {"number": 21}}
    code, ran = ask(action="run", pipelinePath="pipeline.py", runConfig=arguments, **here)
    assert (code, ran["status"], ran["runStatus"]) == (0, "success", "succeeded")
    (kept,) = [each for each in ran["artifacts"] if each["name"] == "keep.kept"]
    assert Path(kept["uri"]).read_text() == "42"
    assert kept["type"] == "system.Dataset"
    _, listed = ask(action="list", **here)
    assert [each["runId"] for each in listed["runs"]] == [ran["runId"]]
    _, found = ask(action="get-run", runConfig={"runId": ran["runId"]}, **here)
    assert found["artifacts"] == ran["artifacts"]
    _, gone = ask(action="delete", runConfig={"runId": ran["runId"]}, **here)
    assert gone["status"] == "success"
    code, missing = ask(action="get-run", runConfig={"runId": ran["runId"]}, **here)
    assert code == 4
    assert "there is no run" in missing["message"]


@pytest.mark.engine("kfp", ran="the contract on this machine: a step that fails")
def test_a_step_that_fails_is_an_error_and_the_run_is_kept(ask):
    here = {"endpoint": "local"}
    arguments = {"arguments": {"number": -1}}
    code, answer = ask(action="run", pipelinePath="pipeline.py", runConfig=arguments, **here)
    assert (code, answer["status"], answer["runStatus"]) == (4, "error", "failed")
    assert "'double'" in answer["message"]
    assert answer["message"].endswith("(ValueError: no numbers below 0)")
    assert "\x1b" not in answer["message"]
    _, listed = ask(action="list", **here)
    assert [each["runStatus"] for each in listed["runs"]] == ["failed"]
    assert [each["runId"] for each in listed["runs"]] == [answer["runId"]]


@pytest.mark.engine("kfp", validated="the contract at an API played by the test")
def test_a_run_at_an_api_is_begun_seen_and_deleted(ask, api):
    there = {"endpoint": api.url}
    config = {"experimentName": "nights", "runName": "first", "arguments": {"number": 5}}
    code, begun = ask(action="run", pipelinePath="pipeline.py", runConfig=config, **there)
    assert (code, begun["status"], begun["runStatus"]) == (0, "running", "running"), begun
    (kept,) = api.runs.values()
    assert kept["display_name"] == "first"
    assert kept["runtime_config"]["parameters"] == {"number": 5}
    assert kept["pipeline_spec"]["pipelineInfo"]["name"] == "doubling"
    assert api.experiments[kept["experiment_id"]] == "nights"
    assert api.tokens == {"Bearer held-secret"}
    assert begun["dashboardUrl"] == f"{api.url}/#/runs/details/{begun['runId']}"
    api.runs[begun["runId"]]["state"] = "PAUSED"
    _, seen = ask(action="get-run", runConfig={"runId": begun["runId"]}, **there)
    assert seen["runStatus"] == "paused"
    _, listed = ask(action="list", runConfig={"experimentName": "nights"}, **there)
    assert [each["runName"] for each in listed["runs"]] == ["first"]
    code, _ = ask(action="delete", runConfig={"runId": begun["runId"]}, **there)
    assert (code, api.runs) == (0, {})


@pytest.mark.engine("kfp", validated="the contract at an API played by the test: schedule")
def test_a_schedule_has_six_fields_and_its_pipeline(ask, api):
    when = {"cron": "30 2 * * *", "maxConcurrency": 2, "enabled": False}
    code, answer = ask(
        action="schedule", pipelinePath="pipeline.py", scheduleConfig=when, endpoint=api.url
    )
    assert (code, answer["runId"]) == (0, "s0"), answer
    (made,) = api.recurring
    assert made["trigger"]["cron_schedule"]["cron"] == "0 30 2 * * *"
    assert int(made["max_concurrency"]) == 2
    assert made["mode"] == "DISABLE"


@pytest.mark.engine("kfp", validated="the contract: an API that refuses, or is not there")
def test_an_api_that_refuses_or_is_not_there_is_an_error_in_its_words(ask, api):
    api.refuses = 401
    code, answer = ask(action="list", endpoint=api.url)
    assert code == 4
    assert "it does not know you" in answer["message"]
    code, answer = ask(action="list", endpoint="http://127.0.0.1:9")
    assert code == 4
    assert "127.0.0.1:9 is not reached" in answer["message"]


@pytest.mark.engine("kfp", validated="the contract: files that are no pipeline")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "0 pipelines"),
        ("import nowhere\n", "other.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("\nx = (\n", "other.py, line 2: SyntaxError: '(' was never closed"),
    ],
)
def test_a_file_that_is_no_pipeline_is_an_error(ask, tmp_path, text, said):
    (tmp_path / "other.py").write_text(text)
    code, answer = ask(action="compile", pipelinePath="other.py")
    assert (code, answer["status"]) == (4, "error")
    assert said in answer["message"]


@pytest.mark.engine("kfp", validated="the contract: a dry run shows what an API then gets")
@pytest.mark.parametrize("action", ["run", "schedule"])
def test_s2_11_a_dry_run_without_an_endpoint_shows_what_would_be_sent(ask, api, action):
    config = {"experimentName": "nights", "runName": "first", "arguments": {"number": None}}
    asked = {"action": action, "pipelinePath": "pipeline.py", "runConfig": config}
    if action == "schedule":
        asked["scheduleConfig"] = {"cron": "30 2 * * *", "maxConcurrency": 2}
    code, shown = ask(**asked, dryRun=True)
    assert (code, shown["status"]) == (0, "success"), shown
    experiment, begun = shown["sends"]
    assert experiment["body"]["display_name"] == "nights"
    code, _ = ask(**asked, dryRun=True, endpoint=api.url)
    assert (code, api.runs, api.recurring, list(api.experiments)) == (0, {}, [], ["e0"])
    code, _ = ask(**asked, endpoint=api.url)
    assert code == 0
    (sent,) = api.recurring or [api.runs["r0"]]
    kept = {key: each for key, each in sent.items() if key not in ("run_id", "state")}
    assert begun["url"] == f"/apis/v2beta1/{'runs' if action == 'run' else 'recurringruns'}"
    assert begun["body"] == kept | {"experiment_id": "EXPERIMENT_ID"}


@pytest.mark.engine("kfp", validated="the contract: files that are no pipeline")
def test_s2_11_a_dry_run_of_a_file_that_is_no_pipeline_names_its_line(ask, tmp_path):
    (tmp_path / "other.py").write_text("\nx = (\n")
    code, answer = ask(action="run", pipelinePath="other.py", dryRun=True)
    assert (code, answer["status"]) == (4, "error")
    assert "other.py, line 2: SyntaxError" in answer["message"]

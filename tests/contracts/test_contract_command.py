"""`paceline contract`: what it refuses, and what it prints."""

import io
import json
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter

from paceline.cli import cli
from paceline.contracts.skills import SKILLS, find_skill, ray, ray_cluster, ray_train, run_skill
from paceline.contracts.skills.kfp_api import Api
from paceline.contracts.skills.kfp_program import PipelineError
from paceline.contracts.skills.messages.ray import ClusterStatus
from paceline.contracts.skills.messages.read import answer_json, read_request, schema_of
from paceline.errors import JobError

RAY = find_skill("ray-distributed-trainer").request


def refusal(name, text, tmp_path):
    with pytest.raises(JobError) as caught:
        run_skill(name, text, source="standard input", folder=tmp_path)
    return str(caught.value)


def test_an_unknown_contract_names_the_nearest(tmp_path):
    assert "did you mean `pytorch-trainer`?" in refusal("pytorch-trianer", "{}", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "line 1, column 2"),
        ("[1]", "this is a list"),
        ("null", "this is null"),
        ('{"modelPath": ' + "9" * 5000 + "}", "thousands of digits"),
        ("true", "this is true"),
        ("12", "this is a number"),
        ('"epochs"', "this is a text"),
        ('{"modelPath": "a", "modelPath": "b"}', "`modelPath` is written twice"),
        ('{"modelPath": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_request_is_refused_with_its_place(text, said, tmp_path):
    found = refusal("pytorch-trainer", text, tmp_path)
    assert said in found
    assert found.startswith("H030")


def test_every_wrong_key_is_said_at_once(tmp_path):
    asked = {"modelPat": "m.py", "dataConfig": {"trainPath": "t.npz"}, "trainingConfig": {}}
    found = refusal("pytorch-trainer", json.dumps(asked), tmp_path)
    assert "the contract has no key `modelPat`" in found
    assert "did you mean `modelPath`?" in found
    assert "`modelPath` is missing" not in found, "one mistake, one error"
    assert "`trainingConfig.epochs` is missing" in found


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("epochs", "three"), ("learningRate", -1), ("optimizer", "adamm")],
)
def test_a_wrong_value_names_its_key(key, value, tmp_path):
    training = {"epochs": 1, key: value}
    asked = {"modelPath": "m.py", "dataConfig": {"trainPath": "t"}, "trainingConfig": training}
    assert f"`trainingConfig.{key}` is {value!r}" in refusal(
        "pytorch-trainer", json.dumps(asked), tmp_path
    )


def test_the_command_ends_with_2_and_no_traceback_when_the_request_is_wrong(tmp_path):
    found = CliRunner().invoke(cli, ["contract", "pytorch-trainer"], input="{")
    assert isinstance(found.exception, JobError)  # `main` prints it and ends with its exit code
    assert found.exception.exit_code == 2


@pytest.mark.parametrize("text", ["{", '{"modelPath": 1}', "{}", b"\xff"])
@pytest.mark.parametrize("name", [name for name in SKILLS if name != "kubeflow-pipeline-executor"])
def test_a_request_that_is_wrong_is_answered_with_the_contracts_error_object(name, text):
    found = CliRunner().invoke(cli, ["contract", name], input=text)
    answer = json.loads(found.stdout)
    TypeAdapter(find_skill(name).answer).validate_python(answer)
    assert answer["status"] == "error"
    assert answer["message"] == str(found.exception)


def test_s2_11_a_wrong_request_is_answered_with_its_action_and_the_reason():
    asked = json.dumps({"action": "schedule", "pipelinePath": 1})
    found = CliRunner().invoke(cli, ["contract", "kubeflow-pipeline-executor"], input=asked)
    message = str(found.exception)
    assert "`pipelinePath` is 1" in message
    assert json.loads(found.stdout) == {
        "status": "error",
        "action": "schedule",
        "artifacts": [],
        "message": message,
    }


def test_a_wrong_request_without_an_action_has_no_answer_of_kubeflows_contract():
    """Its answers name the action that was asked."""
    found = CliRunner().invoke(cli, ["contract", "kubeflow-pipeline-executor"], input="{}")
    assert isinstance(found.exception, JobError)
    assert found.stdout == ""


@pytest.mark.parametrize("action", ["run", "schedule"])
def test_s2_11_an_argument_that_the_pipeline_does_not_have_is_refused(tmp_path, action):
    """It was sent to Kubeflow, which takes it in silence."""
    package = tmp_path / "sums.yaml"
    package.write_text(
        "pipelineInfo: {name: sums}\n"
        "root: {inputDefinitions: {parameters: {a: {parameterType: NUMBER_INTEGER}}}}\n"
    )
    when = ', "scheduleConfig": {"cron": "0 0 2 * * *"}' if action == "schedule" else ""
    text = f'{{"action": "{action}", "pipelinePath": "sums.yaml", "runConfig": '
    text += f'{{"arguments": {{"a": 1, "b": 2}}}}{when}}}'
    request = read_request(find_skill("kubeflow-pipeline-executor").request, text, source="x")
    with pytest.raises(PipelineError, match="has no parameter b: it has a"):
        Api("http://kfp.invalid", None).begin(request, package)
    package.write_text("- 1")
    with pytest.raises(PipelineError, match="is no compiled pipeline"):
        Api("http://kfp.invalid", None).begin(request, package)


@pytest.mark.parametrize("name", list(SKILLS))
def test_every_contract_has_schemas_of_what_goes_in_and_comes_out(name):
    for kind in ("request", "answer"):
        found = CliRunner().invoke(cli, ["contract", name, "--schema", kind])
        schema = json.loads(found.stdout)
        assert schema["type"] == "object"
        assert schema["additionalProperties"] is False
        assert schema == schema_of(getattr(find_skill(name), kind))


PUBLISHED = {
    "kubeflow-pipeline-executor": (
        {"action", "pipelinePath", "pipelineConfig", "runConfig", "scheduleConfig"},
        {"action"},
        {"status", "action", "pipelineId", "runId", "runStatus", "artifacts", "dashboardUrl"},
        {"status", "action"},
    ),
    "ray-distributed-trainer": (
        {"mode", "config", "trainConfig", "tuneConfig"},
        {"mode", "config"},
        {"status", "results", "checkpointPath", "clusterStatus", "trainingTime"},
        {"status", "results"},
    ),
    "pytorch-trainer": (
        {"modelPath", "dataConfig", "trainingConfig", "checkpointConfig"},
        {"modelPath", "dataConfig", "trainingConfig"},
        {"status", "metrics", "checkpointPath", "learningCurve"},
        {"status", "metrics", "checkpointPath"},
    ),
}
"""Keys and required keys of request and answer, as capabilities.md 3.2 has them."""


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_published_keys_are_there_and_the_required_ones_are_required(name):
    asked, asked_required, answered, answered_required = PUBLISHED[name]
    request, answer = schema_of(find_skill(name).request), schema_of(find_skill(name).answer)
    assert asked <= request["properties"].keys()
    assert set(request["required"]) == asked_required
    assert answered <= answer["properties"].keys()
    assert set(answer["required"]) == answered_required


def test_an_answer_that_breaks_its_schema_never_leaves():
    kind = find_skill("pytorch-trainer")
    good = kind.answer(status="success", metrics={}, checkpointPath="a.pt")
    assert answer_json(good)["status"] == "success"
    object.__setattr__(good, "status", "great")
    with pytest.raises(ValueError, match="status"):
        answer_json(good)


def test_contract_list_shows_what_each_needs():
    found = CliRunner().invoke(cli, ["contract", "list"])
    assert "pytorch-trainer" in found.stdout
    assert "torch" in found.stdout
    assert '"ray[default,train,tune]"' in found.stdout


def test_s2_9_a_cluster_that_does_not_answer_is_told_with_rays_token(tmp_path, monkeypatch):
    def init(**_):
        raise ConnectionError("no answer")

    fake = SimpleNamespace(init=init, shutdown=lambda: None, __spec__="found")
    monkeypatch.setitem(sys.modules, "ray", fake)
    asked = json.dumps({"mode": "cluster", "config": {}})
    answer = run_skill("ray-distributed-trainer", asked, source="here", folder=tmp_path)
    assert answer["status"] == "error"
    assert "no answer (`ray start --head` starts one; one with token" in answer["message"]
    assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in answer["message"]


@pytest.mark.parametrize(
    "error",
    [
        OSError("AF_UNIX path length cannot exceed 107 bytes: /long/path"),
        Exception("The current node timed out during startup."),
    ],
)
def test_s2_9_a_cluster_that_ray_cannot_start_here_is_an_answer(tmp_path, monkeypatch, error):
    def init(**_):
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "need", lambda *_: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    answer = run_skill(
        "ray-distributed-trainer", workers_here(1, tmp_path), source="here", folder=tmp_path
    )
    assert answer["status"] == "error"
    assert f"cannot start a cluster on this machine: {error} (give a short" in answer["message"]


def test_s2_9_an_address_where_nothing_listens_is_told_before_ray_tries(tmp_path, monkeypatch):
    def init(**_):
        raise AssertionError("Ray tries for minutes")

    fake = SimpleNamespace(init=init, shutdown=lambda: None, __spec__="found")
    monkeypatch.setitem(sys.modules, "ray", fake)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        asked = json.dumps({"mode": "cluster", "config": {"address": address}})
        answer = run_skill("ray-distributed-trainer", asked, source="here", folder=tmp_path)
        assert answer["status"] == "error"
        assert f"no Ray cluster answers at {address}: " in answer["message"]
        assert "Connection refused" in answer["message"]


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", 'what listens there answers "SSH-2.0-OpenSSH_9.2p1"'),
        (b"", "what listens there closes the connection"),
        (None, "something listens there, and answers nothing in 0.2 s"),
    ],
)
def test_s2_9_an_address_where_something_else_listens_is_told_with_what_it_answers(
    tmp_path, monkeypatch, greeting, said
):
    def init(**_):
        raise AssertionError("Ray tries for minutes")

    def greet(connection):
        connection.recv(64)
        connection.sendall(greeting)
        connection.close()

    fake = SimpleNamespace(init=init, shutdown=lambda: None, __spec__="found")
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_cluster, "_CONNECT_S", 0.2 if greeting is None else 10.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if greeting is not None:
            threading.Thread(target=lambda: greet(server.accept()[0]), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        asked = json.dumps({"mode": "cluster", "config": {"address": address}})
        answer = run_skill("ray-distributed-trainer", asked, source="here", folder=tmp_path)
    assert f"no Ray cluster answers at {address}: {said} (give HOST:PORT" in answer["message"]


def test_s2_9_a_loop_that_fails_answers_with_its_line_and_what_it_had_reached(
    tmp_path, monkeypatch
):
    said = (
        "Training failed due to worker errors:\n[Rank 0 Error Snippet]:\n"
        f'  File "{tmp_path}/t.py", line 12, in train_loop\n    raise ValueError("boom")\n'
        "ValueError: boom\n"
    )

    def fit():
        raise RuntimeError(said)

    request = read_request(RAY, workers_here(1, tmp_path), source="here")
    monkeypatch.setattr(ray_train, "load_loop", lambda *_: None)
    monkeypatch.setattr(ray_train, "_reports", lambda: (None, lambda: ({"loss": 5.76}, "/kept/c1")))
    monkeypatch.setattr(ray_train, "make_trainer", lambda *_, **__: SimpleNamespace(fit=fit))
    status = ClusterStatus(numNodes=1, totalCpu=2, totalGpu=0)
    answer = ray_train.run_training(request, tmp_path, status, 0.0)
    assert answer.status == "error"
    assert answer.message == "t.py, line 12: RuntimeError: ValueError: boom"
    assert answer.results.metrics == {"loss": 5.76}
    assert answer.checkpointPath == "/kept/c1"


def test_text_that_is_no_utf8_is_refused():
    found = CliRunner().invoke(cli, ["contract", "pytorch-trainer"], input=io.BytesIO(b'{"\xff"}'))
    assert "not UTF-8" in str(found.exception)


def test_a_request_is_read_into_its_dataclass():
    kind = find_skill("pytorch-trainer").request
    asked = {
        "modelPath": "m.py",
        "dataConfig": {"trainPath": "t.npz"},
        "trainingConfig": {"epochs": 2, "scheduler": "OneCycleLR", "optimizer": "AdamW"},
    }
    request = read_request(kind, json.dumps(asked), source="here")
    assert request.trainingConfig.scheduler == "onecycle"
    assert request.trainingConfig.optimizer == "adamw"
    assert request.checkpointConfig.saveEvery == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "trian"}, "`mode` is 'trian'"),
        ({"trainConfig": None}, "mode tune needs `trainConfig`"),
        ({"tuneConfig": None}, "mode tune needs `tuneConfig`"),
        ({"trainConfig": {"trainerPath": "nowhere.py"}}, "there is no file nowhere.py"),
        ({"trainConfig": {"trainerPath": "t.py", "framework": "jax"}}, "framework` is 'jax'"),
        (
            {"trainConfig": {"trainerPath": "t.py", "scalingConfig": {"minWorkers": 9}}},
            "at least 9 workers are asked for, and at most 2",
        ),
    ],
)
def test_a_request_of_ray_that_cannot_be_is_refused(change, said, tmp_path):
    (tmp_path / "t.py").touch()
    space = {"lr": {"type": "loguniform", "min": 1e-4, "max": 1e-1}}
    asked = {
        "mode": "tune",
        "config": {"numWorkers": 2},
        "trainConfig": {"trainerPath": "t.py"},
        "tuneConfig": {"searchSpace": space, "metric": "loss"},
    } | change
    asked = {key: value for key, value in asked.items() if value is not None}
    assert said in refusal("ray-distributed-trainer", json.dumps(asked), tmp_path)


def workers_here(number, tmp_path):
    (tmp_path / "t.py").touch()
    asked = {
        "mode": "train",
        "config": {"numWorkers": number},
        "trainConfig": {"trainerPath": "t.py"},
    }
    return json.dumps(asked)


def test_s2_9_more_workers_than_this_machines_memory_holds_are_refused_before_any_starts(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = refusal("ray-distributed-trainer", workers_here(100_000, tmp_path), tmp_path)
    assert "100,000 workers need 24.4 TiB at least, and this machine has" in found
    assert "workers or fewer, or the address of a cluster" in found
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")  # where the cluster's own memory counts
    request = read_request(RAY, workers_here(100_000, tmp_path), source="here")
    assert not list(ray._check(request, tmp_path))
    assert ray_cluster.shares_cores(request) is None


def test_s2_9_workers_that_share_this_machines_cores_are_said_to(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    request = read_request(RAY, workers_here(3, tmp_path), source="here")
    assert "3 workers ask for 3 cores and share the 2" in ray_cluster.shares_cores(request)
    assert (
        ray_cluster.shares_cores(read_request(RAY, workers_here(2, tmp_path), source="here"))
        is None
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"type": "choice"}, "a choice needs values"),
        ({"type": "uniform", "min": 1}, "uniform needs min and max"),
        ({"type": "uniform", "min": 2, "max": 1}, "min 2 is not below max 1"),
        ({"type": "loguniform", "min": 0, "max": 1}, "min 0 has no logarithm"),
        ({"type": "randint", "min": 0.5, "max": 2}, "randint takes whole numbers"),
        ({"type": "normal"}, "type` is 'normal'"),
    ],
)
def test_values_that_cannot_be_searched_are_refused(values, said, tmp_path):
    (tmp_path / "t.py").touch()
    asked = {
        "mode": "tune",
        "config": {},
        "trainConfig": {"trainerPath": "t.py"},
        "tuneConfig": {"searchSpace": {"lr": values}, "metric": "loss"},
    }
    assert said in refusal("ray-distributed-trainer", json.dumps(asked), tmp_path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"action": "runn"}, "`action` is 'runn'"),
        ({"action": "compile"}, "compile needs a pipeline"),
        ({"action": "compile", "pipelinePath": "nowhere.py"}, "there is no file nowhere.py"),
        ({"action": "compile", "pipelinePath": "p.txt"}, "neither Python nor YAML"),
        ({"action": "run", "pipelinePath": "p.py"}, "no Kubeflow Pipelines API is named"),
        ({"action": "run", "pipelinePath": "p.py"}, '"dryRun": true shows what would be sent'),
        ({"action": "list", "dryRun": True}, "list sends nothing that could be shown"),
        (
            {"action": "run", "pipelinePath": "p.py", "dryRun": True, "endpoint": "local"},
            "dryRun",
        ),
        ({"action": "run", "pipelinePath": "p.py", "dryRun": True, "endpoint": "x"}, "x is no URL"),
        ({"action": "list", "endpoint": "kfp:80"}, "kfp:80 is no URL"),
        ({"action": "get-run", "endpoint": "local"}, "get-run needs the run's id"),
        ({"action": "delete", "endpoint": "local"}, "delete needs the run's id"),
        ({"action": "schedule", "pipelinePath": "p.py"}, "schedule needs `scheduleConfig`"),
        (
            {"action": "schedule", "pipelinePath": "p.py", "scheduleConfig": {"cron": "daily"}},
            "seconds first",
        ),
    ],
)
def test_s2_11_a_request_of_a_pipeline_that_cannot_be_is_refused(
    asked, said, tmp_path, monkeypatch
):
    monkeypatch.delenv("KFP_ENDPOINT", raising=False)
    (tmp_path / "p.py").touch()
    (tmp_path / "p.txt").touch()
    assert said in refusal("kubeflow-pipeline-executor", json.dumps(asked), tmp_path)


@pytest.mark.parametrize(
    ("cron", "said"),
    [
        ("0 99 2 * * *", "`99` is no minute of cron: 0 to 59"),
        ("61 2 * * *", "`61` is no minute of cron"),  # of five fields the first is minutes
        ("0 0 24 * * *", "`24` is no hour of cron: 0 to 23"),
        ("0 0 2 0 * *", "`0` is no day of the month"),
        ("0 0 2 L * *", "`L` is no day of the month"),
        ("0 0 2 * 13 *", "`13` is no month of cron: 1 to 12"),
        ("0 0 2 * * 7", "`7` is no day of the week of cron: 0 to 6"),
        ("0 0 2 * * FRI-MON", "`FRI-MON` is no day of the week"),
        ("0 0/0 2 * * *", "`0/0` is no minute"),
        ("0 1-2-3 2 * * *", "`1-2-3` is no minute"),
        ("0 1, 2 * * *", "`` is no minute"),
        ("* * * *", "6 fields, seconds first, and this has 4"),
    ],
)
def test_s2_11_a_cron_that_kubeflow_would_refuse_is_refused_with_the_request(cron, said, tmp_path):
    asked = {"action": "schedule", "pipelinePath": "p.py", "scheduleConfig": {"cron": cron}}
    message = refusal("kubeflow-pipeline-executor", json.dumps(asked), tmp_path)
    assert said in message
    assert "fix: write text such as '0 30 2 * * *'" in message


@pytest.mark.parametrize(
    "cron",
    ["30 2 * * *", "0 0-59/15 */2 1,15 JAN-Mar ?", "0 5/10 2 ? * mon-FRI", "59 59 23 31 12 6"],
)
def test_s2_11_a_cron_that_kubeflow_reads_is_taken(cron, tmp_path):
    asked = {"action": "schedule", "scheduleConfig": {"cron": cron}}
    message = refusal("kubeflow-pipeline-executor", json.dumps(asked), tmp_path)
    assert "schedule needs a pipeline" in message
    assert "cron" not in message


def test_standard_input_that_is_closed_is_a_usage_error():
    command = [sys.executable, "-m", "paceline", "contract", "pytorch-trainer"]
    shell = ["sh", "-c", '"$@" <&-', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Give the request on standard input" in done.stderr


def test_s2_9_an_unknown_key_of_a_searched_value_lists_the_keys_that_it_may_have(tmp_path):
    values = {"type": "uniform", "lower": 0.1, "upper": 1}
    asked = {
        "mode": "tune",
        "config": {},
        "trainConfig": {"trainerPath": "t.py"},
        "tuneConfig": {"searchSpace": {"lr": values}, "metric": "loss"},
    }
    found = refusal("ray-distributed-trainer", json.dumps(asked), tmp_path)
    assert "section `tuneConfig.searchSpace.lr` has no key `lower`" in found
    assert "known keys are type, min, max, values" in found

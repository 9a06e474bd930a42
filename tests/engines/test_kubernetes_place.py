"""`paceline run --on kubernetes` at an API server that the test plays: what is created, said, shown
and deleted; and every way in which a cluster refuses."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

SOURCE = Path(__file__).parents[2] / "src"
JOB = {
    "name": "My.Job_1",
    "model": {"decoder": {"layers": 4, "hidden": 256, "heads": 8}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "network": "400Gb/s"},
    "train": {"global_batch": 64, "steps": 100, "precision": "bf16"},
    "layout": {"sharding": "full"},
    "kubernetes": {
        "image": "registry.internal/train:1",
        "namespace": "training",
        "claim": "shared",
        "secrets": {"HF_TOKEN": "hf/token"},
    },
}


class PlayedCluster(ThreadingHTTPServer):
    """Objects by their path, as an API server keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, dict] = {}
        self.pods: list[dict] = []
        self.created: list[str] = []
        self.token = "Bearer good-token"
        self.lacks: set[str] = set()
        self.forbids: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: PlayedCluster

    def answer(self, value: object, status: int = 200) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str) -> None:
        self.answer({"kind": "Status", "code": status, "message": message}, status)

    def handle_one(self, method: str) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        plural = re.split("/namespaces/[^/]+/", parts.path)[1].split("/")[0]
        if self.headers.get("Authorization") != self.server.token:
            return self.refuse(401, "Unauthorized")
        if plural in self.server.forbids:
            return self.refuse(403, f'cannot {method.lower()} resource "{plural}"')
        if plural in self.server.lacks:
            return self.refuse(404, "the server could not find the requested resource")
        if method == "POST":
            assert parse_qs(parts.query) == {"fieldValidation": ["Strict"]}
            path = f"{parts.path}/{body['metadata']['name']}"
            if path in self.server.objects:
                return self.refuse(409, f"{plural} already exists")
            self.server.objects[path] = body
            self.server.created.append(body["kind"])
            return self.answer(body, 201)
        if plural == "pods" and parts.path.endswith("/log"):
            return self.answer(f"log of {parts.path.split('/')[-2]}\n".encode())
        if plural == "pods":
            key, _, value = parse_qs(parts.query)["labelSelector"][0].partition("=")
            found = [e for e in self.server.pods if e["metadata"]["labels"].get(key) == value]
            return self.answer({"items": found})
        if parts.path not in self.server.objects:
            return self.refuse(404, "not found")
        if method == "DELETE":
            assert body == {"propagationPolicy": "Foreground"}
            return self.answer(self.server.objects.pop(parts.path))
        return self.answer(self.server.objects[parts.path])

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[PlayedCluster]:
    server = PlayedCluster()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def paceline(python_with, tmp_path, cluster):
    """`paceline("run", "job.yaml", ...)`: exit code, standard output, standard error."""
    python = python_with("kubernetes")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    write_config(tmp_path, f"http://127.0.0.1:{cluster.server_address[1]}")

    def run(*words, **environment):
        given = {"PYTHONPATH": str(SOURCE), "KUBECONFIG": str(tmp_path / "kubeconfig")}
        done = subprocess.run(
            [python, "-m", "paceline", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | given | environment,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert "good-token" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def write_config(folder, server, token="good-token"):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


ON = ("run", "job.yaml", "--on", "kubernetes")
VALIDATED = "the place, at an API played by the test: "


@pytest.mark.engine("kubernetes", validated=VALIDATED + "submit, status, logs, stop")
def test_a_run_is_submitted_watched_and_ended(paceline, cluster, tmp_path):
    _, dry, _ = paceline(*ON, "--dry-run")
    assert cluster.created == []
    code, said, error = paceline(*ON, "--out", "runs/one")
    assert code == 0, error
    assert cluster.created == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    written = (tmp_path / "runs/one/place/objects.yaml").read_text()
    assert list(yaml.safe_load_all(written)) == list(cluster.objects.values())
    assert written in dry  # exactly what was shown
    assert "training.trainjob.my-job-1" in said
    place = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/training/trainjobs/my-job-1"
    cluster.objects[place]["status"] = {}
    labels = {"jobset.sigs.k8s.io/jobset-name": "my-job-1"}
    cluster.pods = [
        {
            "metadata": {"name": f"my-job-1-node-0-{number}", "labels": labels},
            "spec": {"nodeName": f"gpu-{number}"},
            "status": {"phase": "Running", "startTime": "2026-11-22T03:00:00Z"},
        }
        for number in (1, 0)
    ]
    code, said, error = paceline("status", "runs/one", "--json")
    assert json.loads(said)["queue"]["state"] == "running", error
    assert json.loads(said)["queue"]["nodes"] == ["gpu-0", "gpu-1"]
    _, said, _ = paceline("logs", "runs/one", "--rank", "9")
    assert said == "log of my-job-1-node-0-1\n"
    code, _, error = paceline("run", "--resume", "runs/one", "--on", "kubernetes")
    assert (code, "W013" in error) == (2, True)
    code, _, error = paceline("stop", "runs/one")
    assert (code, cluster.objects) == (0, {}), error


@pytest.mark.engine("kubernetes", validated=VALIDATED + "PyTorchJob and RayJob")
@pytest.mark.parametrize(("api", "kind"), [("pytorchjob", "PyTorchJob"), ("rayjob", "RayJob")])
def test_the_other_kinds_are_submitted_too(paceline, cluster, tmp_path, api, kind):
    code, said, error = paceline(*ON, "--set", f"kubernetes.api={api}")
    assert code == 0, error
    assert cluster.created == ["ConfigMap", kind]
    assert f"training.{api}.my-job-1" in said
    (run,) = tmp_path.glob("runs/*")
    code, said, error = paceline("status", str(run), "--json")
    assert json.loads(said)["queue"]["state"] == "waiting", error
    (place,) = [path for path in cluster.objects if "configmaps" not in path]
    cluster.objects[place]["status"] = {"rayClusterName": "my-job-1-x7"}
    labels = {"ray.io/cluster": "my-job-1-x7", "training.kubeflow.org/job-name": "my-job-1"}
    cluster.pods = [{"metadata": {"name": "one", "labels": labels}, "spec": {}, "status": {}}]
    code, said, error = paceline("logs", str(run))
    assert (code, said) == (0, "log of one\n"), error


@pytest.mark.engine("kubernetes", validated=VALIDATED + "nothing is left half-submitted")
@pytest.mark.parametrize(
    ("attribute", "plural", "code_said"),
    [("lacks", "trainjobs", "W024"), ("forbids", "trainjobs", "W023")],
)
def test_what_was_created_before_a_refusal_is_deleted(
    paceline, cluster, tmp_path, attribute, plural, code_said
):
    getattr(cluster, attribute).add(plural)
    code, _, error = paceline(*ON, "--out", "runs/one")
    assert code == (4 if attribute == "forbids" else 2)
    assert code_said in error
    assert "TrainJob my-job-1" in error
    assert cluster.created == ["ConfigMap", "TrainingRuntime"]
    assert cluster.objects == {}
    assert not (tmp_path / "runs/one").exists()


@pytest.mark.engine("kubernetes", validated=VALIDATED + "a name that is taken")
def test_a_name_that_is_taken_is_refused_and_the_other_run_kept(paceline, cluster):
    paceline(*ON)
    before = dict(cluster.objects)
    code, _, error = paceline(*ON)
    assert (code, "W025" in error) == (2, True)
    assert cluster.objects == before


@pytest.mark.engine("kubernetes", validated=VALIDATED + "expired, unreachable, unknown")
def test_a_cluster_that_cannot_be_asked_is_said_in_words(paceline, cluster, tmp_path):
    server = f"http://127.0.0.1:{cluster.server_address[1]}"
    write_config(tmp_path, server, token="old")
    code, _, error = paceline(*ON)
    assert (code, "W023" in error, "log in again" in error) == (4, True, True)
    write_config(tmp_path, "http://127.0.0.1:9")
    code, _, error = paceline(*ON)
    assert (code, "W022" in error, "not reached" in error) == (4, True, True)
    (tmp_path / "kubeconfig").write_text("{}")
    code, _, error = paceline(*ON)
    assert (code, "W021" in error) == (4, True), error
    (tmp_path / "kubeconfig").unlink()
    code, _, error = paceline(*ON)
    assert (code, "W021" in error) == (4, True), error
    code, said, _ = paceline(*ON, "--dry-run")  # needs none of it
    assert (code, "kind: TrainJob" in said) == (0, True)


@pytest.mark.engine("kubernetes", validated=VALIDATED + "no image, a program of this machine")
def test_what_the_place_cannot_take_is_refused_before_anything_is_asked(paceline, cluster):
    code, _, error = paceline(*ON, "--set", "kubernetes.image=null")
    assert (code, "W026" in error) == (2, True)
    code, _, error = paceline("run", "--script", "train.py", "--on", "kubernetes")
    assert (code, "W014" in error) == (2, True)
    assert cluster.created == []


BROKEN = {
    "a folder": None,
    "bad YAML": b"a: [",
    "not UTF-8": b"\xff\xfe\x00",
    "a word": b"hello",
    "a list": b"- 1\n",
}


@pytest.mark.engine("kubernetes", validated=VALIDATED + "damaged kubeconfigs")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_kubeconfig_is_said_and_nothing_is_left(paceline, tmp_path, kind):
    text = BROKEN[kind]
    path = tmp_path / "broken"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text)
    code, _, error = paceline(*ON, KUBECONFIG=str(path))
    assert (code, "W021" in error) == (4, True), error
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.engine("kubernetes", validated=VALIDATED + "certificates and logins that do not work")
def test_a_certificate_that_is_none_and_a_login_program_that_is_not_there_are_said(
    paceline, tmp_path, cluster
):
    config = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    server = config["clusters"][0]["cluster"]["server"]
    config["clusters"][0]["cluster"] = {
        "server": server.replace("http:", "https:"),
        "certificate-authority-data": "abcde",
    }
    (tmp_path / "certificate").write_text(yaml.safe_dump(config))
    code, _, error = paceline(*ON, KUBECONFIG=str(tmp_path / "certificate"))
    assert (code, "W021" in error) == (4, True), error
    config["clusters"][0]["cluster"] = {"server": server}
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-login"}
    config["users"][0]["user"] = {"exec": program | {"interactiveMode": "Never"}}
    (tmp_path / "login").write_text(yaml.safe_dump(config))
    code, _, error = paceline(*ON, KUBECONFIG=str(tmp_path / "login"))
    assert (code, "W023" in error, "no-such-login" in error) == (4, True, True), error
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.engine("kubernetes", validated=VALIDATED + "data that pods have and have not")
def test_data_of_this_machine_is_refused_and_data_of_the_image_is_taken(paceline, cluster):
    data = ("--set", "data.corpus=null", "--set")
    code, _, error = paceline(*ON, *data, "data.path=corpus/*.txt")
    assert (code, "W027" in error) == (2, True), error
    assert cluster.created == []
    code, _, error = paceline(*ON, *data, "data.path=/workspace/corpus/*.txt")
    assert code == 0, error
    assert cluster.created == ["ConfigMap", "TrainingRuntime", "TrainJob"]

"""The programs that go along to a cloud, run here: nothing is rented."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from tests.render.test_clouds import cloud_files

from paceline import render

SCRIPTS = Path(render.__file__).parent / "scripts"


def program(folder: Path, name: str, text: str) -> None:
    """A pretend program in `folder/bin`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | environment
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def guard(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, str(SCRIPTS / "cloud_guard.py"), "--look-s", "0.05", *words)


def test_the_guard_ends_with_the_commands_own_exit_code(tmp_path):
    done = guard(tmp_path, "--max-run-s", "60", "--idle-s", "60", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "no nvidia-smi: an idle machine is not seen here" in done.stderr


def test_the_guard_ends_everything_after_the_longest_time(tmp_path):
    started = time.monotonic()
    command = "sleep 300 & echo $! > pid; wait"
    done = guard(tmp_path, "--max-run-s", "0.5", "--idle-s", "60", "--", "sh", "-c", command)
    assert done.returncode == 124
    assert time.monotonic() - started < 250
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    assert not status.exists() or "(zombie)" in status.read_text()


def test_s0_16_the_guard_ends_when_the_budget_is_spent(tmp_path):
    money = ("--per-hour-usd", "3600", "--budget-usd", "0.5")  # half a second
    done = guard(tmp_path, "--max-run-s", "60", "--idle-s", "60", *money, "--", "sleep", "300")
    assert done.returncode == 124
    assert "the limit is 0 s" in done.stderr
    assert ", $0." in done.stderr


def test_s0_16_the_guard_alerts_before_the_limit_and_looks_again_when_it_is_reached(tmp_path):
    money = ("--per-hour-usd", "7200", "--budget-usd", "2")  # a second
    script = str(SCRIPTS / "cloud_guard.py")
    limits = ("--max-run-s", "60", "--idle-s", "60", "--look-s", "0.1", *money)
    done = run(tmp_path, script, *limits, "--", "sleep", "300")
    told = re.findall(r"alert: \d s, \$(\d\.\d\d) so far, (\d+)% of the limit of 1 s", done.stderr)
    assert "95" in {share for _, share in told}
    assert [float(dollars) / 2 >= int(share) / 100 for dollars, share in told] == [True] * len(told)
    limits = ("--max-run-s", "0.5", "--idle-s", "60", "--look-s", "100")
    began = time.monotonic()
    assert run(tmp_path, script, *limits, "--", "sleep", "300").returncode == 124
    assert time.monotonic() - began < 60


def test_the_guard_takes_no_budget_that_it_could_not_count(tmp_path):
    limits = ("--max-run-s", "9", "--idle-s", "9", "--budget-usd", "3")
    refused = guard(tmp_path, *limits, "--", "touch", str(tmp_path / "started"))
    assert refused.returncode == 2
    assert "--budget-usd needs --per-hour-usd" in refused.stderr
    assert not (tmp_path / "started").exists()


def test_s0_16_the_guard_ends_an_idle_machine_and_leaves_a_busy_one(tmp_path):
    program(tmp_path, "nvidia-smi", "echo 0; echo 0")
    done = guard(tmp_path, "--max-run-s", "60", "--idle-s", "0.4", "--", "sleep", "300")
    assert done.returncode == 125
    assert "every GPU idle" in done.stderr
    program(tmp_path, "nvidia-smi", "echo 0; echo 97")
    done = guard(tmp_path, "--max-run-s", "60", "--idle-s", "0.4", "--", "sleep", "1")
    assert done.returncode == 0


def test_earlier_starts_count_against_the_limit(tmp_path):
    spent = ("--spent-file", "spent", "--idle-s", "60")
    (tmp_path / "spent").write_text("100\n")
    done = guard(tmp_path, "--max-run-s", "100", *spent, "--", "touch", "ran")
    assert done.returncode == 124
    assert "not started: earlier starts took 100 s" in done.stderr
    assert not (tmp_path / "ran").exists()
    done = guard(tmp_path, "--max-run-s", "200", *spent, "--", "touch", "ran")
    assert done.returncode == 0
    assert float((tmp_path / "spent").read_text()) >= 100


def written(engine: str, folder: Path, **changes: Any) -> Path:
    for name, text in cloud_files(engine, **changes).files.items():
        (folder / name).write_text(text)
    return folder


def test_runpods_files_fit_into_the_pod_and_secrets_only_from_the_environment(tmp_path):
    own = {"secrets": ["HF_TOKEN"], "image": "with/torch:1"}  # else start.sh installs it
    folder = written("runpod", tmp_path, cloud=own)
    (folder / ".env").write_text("HF_TOKEN=never-in-the-archive\n")
    missing = run(folder, "runpod_submit.py", "--dry-run", HF_TOKEN="")
    assert missing.returncode == 1
    assert "HF_TOKEN is not set in your environment" in missing.stderr
    dry = run(folder, "runpod_submit.py", "--dry-run", HF_TOKEN="the-value")
    assert json.loads(dry.stdout)["env"] == ["HF_TOKEN", "JOB_FILES"]
    assert "the-value" not in dry.stdout
    (folder / "runpod.py").write_text(
        "import json\n"
        "def create_pod(**asked):\n"
        "    json.dump(asked, open('asked.json', 'w'))\n"
        "    return {'id': 'pod-1'}\n"
    )
    done = run(folder, "runpod_submit.py", HF_TOKEN="the-value", RUNPOD_API_KEY="key")
    assert json.loads(done.stdout)["id"] == "pod-1"
    asked = json.loads((folder / "asked.json").read_text())
    assert asked["env"]["HF_TOKEN"] == "the-value"
    assert len(asked["env"]["JOB_FILES"]) < 100_000
    # The pod's own command, here: it unpacks the files, and stops the pod when start.sh ends.
    start = asked["docker_args"].replace("/workspace", str(tmp_path / "pod"))
    program(folder, "runpodctl", f"echo $@ >> {folder}/stopped")
    program(folder, "torchrun", "exit 3")
    environment = {"JOB_FILES": asked["env"]["JOB_FILES"], "RUNPOD_POD_ID": "pod-1"}
    env = os.environ | environment | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    ended = subprocess.run(start, shell=True, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 3, ended.stderr
    assert (folder / "stopped").read_text() == "stop pod pod-1\n"
    assert not (tmp_path / "pod" / "job" / ".env").exists()


class Lambda(BaseHTTPRequestHandler):
    """A pretend API of Lambda."""

    seen: ClassVar[list[tuple[str, Any, str | None]]] = []
    busy: ClassVar[dict[str, list[int]]] = {}
    """Status codes that a path answers with first; with 0 it hangs up without an answer."""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.seen.append((self.path, body, self.headers["Authorization"]))
        if codes := self.busy.get(self.path):
            if code := codes.pop(0):
                self.send_response(code)
                self.end_headers()
            return
        regions = {"regions_with_capacity_available": [{"name": "us-east-1"}]}
        answers = {
            "/instance-types": {"gpu_8x_h100_sxm5": regions},
            "/instance-operations/launch": {"instance_ids": ["i-1"]},
            "/instances/i-1": {"status": "active", "ip": "10.0.0.9"},
            "/instance-operations/terminate": {"terminated_instances": []},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": answers[self.path]}).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def lambda_api() -> Iterator[str]:
    """Its address."""
    Lambda.seen.clear()
    Lambda.busy.clear()
    server = HTTPServer(("127.0.0.1", 0), Lambda)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def trains(folder: Path, *, code: int = 0) -> dict[str, str]:
    """Pretend programs of an instance whose training ends with `code`, and the environment."""
    # ssh runs here what it would run there; rsync notes what it would copy.
    knows = f'grep "^10.0.0.9 ssh-ed25519 " "${{2#*=}}" >> {folder}/known'
    program(folder, "ssh", f'{knows}; shift 5; mkdir -p {folder}/home; cd {folder}/home; eval "$@"')
    copies = f"cp {folder}/*.sh {folder}/*.py {folder}/home/job/"
    program(folder, "rsync", f'echo "$@" >> {folder}/copied; mkdir -p {folder}/home/job; {copies}')
    program(folder, "torchrun", f'echo "token $HF_TOKEN"; exit {code}')
    return {
        "LAMBDA_API_KEY": "the-key",
        "LAMBDA_SSH_KEY_NAME": "mine",
        "LAMBDA_WAIT_S": "0.05",
        "HF_TOKEN": "the-token",
    }


@pytest.mark.parametrize("code", [0, 5])
def test_lambdas_instance_is_terminated_whatever_happens(tmp_path, lambda_api, code):
    folder = written("lambda", tmp_path, cloud={"secrets": ["HF_TOKEN"]})
    environment = trains(folder, code=code)
    done = run(folder, "lambda_submit.py", LAMBDA_API_URL=lambda_api, **environment)
    assert done.returncode == code, done.stderr
    assert f"start.sh ended with {code}" in done.stdout
    assert "token the-token" in done.stdout
    paths = [path for path, _, _ in Lambda.seen]
    assert paths[:3] == ["/instance-types", "/instance-operations/launch", "/instances/i-1"]
    assert paths[3:] == ["/instance-operations/terminate"] * 2  # it itself, and who started it
    asked = Lambda.seen[1][1]
    user_data = yaml.safe_load(asked.pop("user_data"))
    assert asked == {
        "region_name": "us-east-1",
        "instance_type_name": "gpu_8x_h100_sxm5",
        "name": "tiny",
        "ssh_key_names": ["mine"],
    }
    # What ssh accepts of the instance is the key that it was started with, and no other.
    known = set((folder / "known").read_text().splitlines())
    assert known == {f"10.0.0.9 {user_data['ssh_keys']['ed25519_public']}"}
    assert "BEGIN OPENSSH PRIVATE KEY" in user_data["ssh_keys"]["ed25519_private"]
    assert {key for _, _, key in Lambda.seen} == {"Bearer the-key"}
    copied = (folder / "copied").read_text()
    assert "--exclude=.env*" in copied
    assert "StrictHostKeyChecking=yes" in copied
    assert "ubuntu@10.0.0.9:job/checkpoints" in copied
    kept = [path.read_text() for path in (folder / "home").rglob("*") if path.is_file()]
    assert not [text for text in kept if "the-key" in text or "the-token" in text]


def test_lambdas_instance_is_terminated_though_the_api_is_busy(tmp_path, lambda_api):
    folder = written("lambda", tmp_path, cloud={"secrets": ["HF_TOKEN"]})
    Lambda.busy |= {"/instances/i-1": [429], "/instance-operations/terminate": [503, 429, 500]}
    done = run(folder, "lambda_submit.py", LAMBDA_API_URL=lambda_api, **trains(folder))
    assert done.returncode == 0, done.stderr
    paths = [path for path, _, _ in Lambda.seen]
    assert paths.count("/instance-operations/terminate") == 5  # three refused, both heard at last
    assert "instance i-1 is terminated" in done.stdout


def test_lambdas_instance_ends_itself_though_the_network_is_away_at_first(tmp_path, lambda_api):
    folder = written("lambda", tmp_path, cloud={"secrets": ["HF_TOKEN"]})
    Lambda.busy |= {"/instance-operations/terminate": [0, 0]}
    done = run(folder, "lambda_submit.py", LAMBDA_API_URL=lambda_api, **trains(folder))
    assert done.returncode == 0, done.stderr
    paths = [path for path, _, _ in Lambda.seen]
    assert paths.count("/instance-operations/terminate") == 4  # two unheard, both heard at last
    assert "ConnectionResetError" not in done.stderr
    assert "RemoteDisconnected" not in done.stderr


def test_an_instance_that_lambda_does_not_terminate_is_named(tmp_path, lambda_api):
    folder = written("lambda", tmp_path, cloud={"secrets": ["HF_TOKEN"]})
    Lambda.busy |= {"/instance-operations/terminate": [403, 403]}
    done = run(folder, "lambda_submit.py", LAMBDA_API_URL=lambda_api, **trains(folder))
    assert done.returncode == 1
    assert "The instance i-1 may still run, and costs money while it does." in done.stderr


def test_lambda_sends_nothing_to_a_machine_that_has_another_key(tmp_path, lambda_api):
    folder = written("lambda", tmp_path, cloud={"secrets": ["HF_TOKEN"]})
    environment = trains(folder) | {"LAMBDA_WAIT_S": "0.001"}
    program(folder, "ssh", 'echo "Host key verification failed." >&2; exit 255')
    done = run(folder, "lambda_submit.py", LAMBDA_API_URL=lambda_api, **environment)
    assert done.returncode == 1
    assert "does not answer with the ssh key that it was started with" in done.stderr
    assert not (folder / "copied").exists()
    assert Lambda.seen[-1][0] == "/instance-operations/terminate"


def test_lambdas_refusal_is_said_and_nothing_is_left(tmp_path, lambda_api):
    folder = written("lambda", tmp_path, cluster={"per_node": 1})
    environment = {"LAMBDA_API_URL": lambda_api, "LAMBDA_API_KEY": "key"}
    done = run(folder, "lambda_submit.py", LAMBDA_SSH_KEY_NAME="mine", **environment)
    assert done.returncode == 1
    assert "Lambda has no instance type gpu_1x_h100_sxm5" in done.stderr
    assert [path for path, _, _ in Lambda.seen] == ["/instance-types"]

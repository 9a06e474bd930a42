"""Starts the instance of `instance.json`, trains on it, fetches the checkpoints, and ends it.

    LAMBDA_API_KEY=... LAMBDA_SSH_KEY_NAME=... python3 lambda_submit.py [--dry-run]

Needs Python, ssh and rsync. Secrets and the API key go to the instance over ssh, into the
environment of one process, and into no file. If this program is lost, that process still ends the
instance when training ends or a limit is reached.
"""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

API = os.environ.get("LAMBDA_API_URL", "https://cloud.lambda.ai/api/v1")
FOLDER = Path(__file__).resolve().parent
_BOOTING_S = 1200
"""Large instances take some minutes."""

_ON_INSTANCE = """
import json, os, signal, subprocess, sys, urllib.request
given = json.loads(sys.stdin.readline())
os.environ.update(given["environment"])
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # when ssh is lost, go on to the end
try:
    code = subprocess.run(["bash", "start.sh"], cwd="job").returncode
    print("start.sh ended with", code, flush=True)
    fetched = sys.stdin.readline()  # waits for who started it to fetch the checkpoints, or to go
finally:
    body = json.dumps({"instance_ids": [given["instance"]]}).encode()
    asked = urllib.request.Request(given["api"] + "/instance-operations/terminate", body)
    asked.add_header("Authorization", "Bearer " + given["key"])
    asked.add_header("Content-Type", "application/json")
    urllib.request.urlopen(asked, timeout=60)
sys.exit(code)
"""


def call(path: str, body: dict[str, Any] | None = None) -> Any:
    """What the API answers.

    Raises:
        SystemExit: It refuses, in its own words.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{API}/{path}", data)
    request.add_header("Authorization", f"Bearer {os.environ['LAMBDA_API_KEY']}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["data"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"Lambda says {error.code}: {error.read().decode()[:500]}") from None
    except OSError as error:
        raise SystemExit(f"Lambda cannot be reached: {error}") from None


def find_region(name: str) -> str:
    """A region that has the instance type now."""
    offer = call("instance-types").get(name)
    if offer is None:
        raise SystemExit(f"Lambda has no instance type {name}")
    regions = [each["name"] for each in offer["regions_with_capacity_available"]]
    if not regions:
        raise SystemExit(f"no region has {name} now; try again later")
    return str(regions[0])


def wait_for_address(instance: str) -> str:
    """The instance's address when it is up."""
    deadline = time.monotonic() + _BOOTING_S
    while time.monotonic() < deadline:
        found = call(f"instances/{instance}")
        if found["status"] == "active" and found.get("ip"):
            return str(found["ip"])
        time.sleep(15)
    raise SystemExit(f"the instance {instance} did not come up in {_BOOTING_S} s")


def train(instance: str, address: str, secrets: dict[str, str]) -> int:
    """Copy the files, run start.sh, fetch the checkpoints."""
    host = f"ubuntu@{address}"
    ssh = ["ssh", "-o", "StrictHostKeyChecking=accept-new", host]
    for _ in range(20):  # sshd starts a little later
        if subprocess.run([*ssh, "true"], check=False).returncode == 0:
            break
        time.sleep(15)
    copy = ["rsync", "-a", "--exclude=.env*", "--exclude=checkpoints", f"{FOLDER}/", f"{host}:job/"]
    subprocess.run(copy, check=True)
    given = {
        "environment": secrets,
        "instance": instance,
        "key": os.environ["LAMBDA_API_KEY"],
        "api": API,
    }
    words = [*ssh, f"python3 -c {shlex.quote(_ON_INSTANCE)}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(json.dumps(given) + "\n")
        run.stdin.flush()
        for line in run.stdout:
            print(line, end="", flush=True)
            if line.startswith("start.sh ended with"):
                fetch = ["rsync", "-a", f"{host}:job/checkpoints", f"{FOLDER}/"]
                subprocess.run(fetch, check=False)
                run.stdin.write("fetched\n")
                run.stdin.flush()
        return run.wait()


def main() -> None:
    """One instance from its start to its end."""
    asked: dict[str, Any] = json.loads((FOLDER / "instance.json").read_text())
    names = asked.pop("secrets")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise SystemExit(f"{', '.join(missing)} is not set in your environment")
    body = asked | {"ssh_key_names": [os.environ["LAMBDA_SSH_KEY_NAME"]]}
    if "--dry-run" in sys.argv[1:]:
        print(json.dumps(body | {"secrets": names}, indent=2))
        return
    body["region_name"] = body["region_name"] or find_region(body["instance_type_name"])
    (instance,) = call("instance-operations/launch", body)["instance_ids"]
    print(f"instance {instance}", flush=True)
    try:
        address = wait_for_address(instance)
        code = train(instance, address, {name: os.environ[name] for name in names})
    finally:  # also when this program is interrupted; a second time does no harm
        call("instance-operations/terminate", {"instance_ids": [instance]})
        print(f"instance {instance} is terminated", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()

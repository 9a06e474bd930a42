"""Starts the instance of `instance.json`, trains on it, fetches the checkpoints, and ends it.

    LAMBDA_API_KEY=... LAMBDA_SSH_KEY_NAME=... python3 lambda_submit.py [--dry-run]

Needs Python, ssh, ssh-keygen and rsync. The instance starts with an ssh host key made here
(cloud-init's `ssh_keys`), so ssh knows it before anything is sent. Secrets and the API key go to
the instance over ssh, into the environment of one process, and into no file. If this program is
lost, that process still ends the instance when training ends or a limit is reached. Where the API
does not answer or refuses for now, both ask again for an hour.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

API = os.environ.get("LAMBDA_API_URL", "https://cloud.lambda.ai/api/v1")
FOLDER = Path(__file__).resolve().parent
WAIT_S = float(os.environ.get("LAMBDA_WAIT_S", "2"))
"""Before the API is asked again; twice as long each time, a minute at most."""

_BOOTING_S = 1200
"""Large instances take some minutes."""

_ENDING_S = 3600
"""How long the end of an instance is asked for. An instance that is not ended is paid for."""

_ON_INSTANCE = """
import json, os, signal, subprocess, sys, time, urllib.error, urllib.request
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
    until, wait = time.monotonic() + given["ending_s"], given["wait_s"]
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(asked, timeout=60)
            break
        except urllib.error.HTTPError as error:
            if error.code != 429 and error.code < 500:
                raise
        except OSError:
            pass
        time.sleep(wait)
        wait = min(2 * wait, 60)
sys.exit(code)
"""


class Busy(Exception):
    """The API does not answer, or refuses for now (429, 5xx); asking again may help."""


def call(path: str, body: dict[str, Any] | None = None) -> Any:
    """What the API answers.

    Raises:
        Busy: It may answer later.
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
        reason = f"Lambda says {error.code}: {error.read().decode()[:500]}"
        if error.code == 429 or error.code >= 500:
            raise Busy(reason) from None
        raise SystemExit(reason) from None
    except OSError as error:
        raise Busy(f"Lambda cannot be reached: {error}") from None


def call_until(deadline_s: float, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the API answers, asked again until it does.

    Raises:
        Busy: It has not answered for `deadline_s` seconds.
        SystemExit: It refuses, in its own words.
    """
    deadline, wait_s = time.monotonic() + deadline_s, WAIT_S
    while True:
        try:
            return call(path, body)
        except Busy as error:
            if time.monotonic() + wait_s > deadline:
                raise
            print(f"{error}; asked again in {wait_s:g} s", file=sys.stderr, flush=True)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 60.0)


def find_region(name: str) -> str:
    """A region that has the instance type now."""
    offer = call_until(60, "instance-types").get(name)
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
        found = call_until(_BOOTING_S, f"instances/{instance}")
        if found["status"] == "active" and found.get("ip"):
            return str(found["ip"])
        time.sleep(15)
    raise SystemExit(f"the instance {instance} did not come up in {_BOOTING_S} s")


def make_host_key(folder: Path) -> tuple[str, str]:
    """A new ssh host key: the cloud-init text that gives it to an instance, and its public half."""
    path = folder / "host_key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(words, check=True)
    public = path.with_suffix(".pub").read_text().strip()
    private = "".join(f"    {line}\n" for line in path.read_text().splitlines())
    keys = f"  ed25519_private: |\n{private}  ed25519_public: {public}\n"
    return f"#cloud-config\nssh_deletekeys: true\nssh_keys:\n{keys}", public


def train(instance: str, address: str, ssh: list[str], secrets: dict[str, str]) -> int:
    """Copy the files, run start.sh, fetch the checkpoints."""
    host = f"ubuntu@{address}"
    rsync = ["rsync", "-a", "-e", shlex.join(ssh)]
    for _ in range(20):  # sshd starts a little later
        if subprocess.run([*ssh, host, "true"], check=False).returncode == 0:
            break
        time.sleep(WAIT_S * 7)
    else:
        raise SystemExit(f"{host} does not answer with the ssh key that it was started with")
    copy = [*rsync, "--exclude=.env*", "--exclude=checkpoints", f"{FOLDER}/", f"{host}:job/"]
    subprocess.run(copy, check=True)
    given = {
        "environment": secrets,
        "instance": instance,
        "key": os.environ["LAMBDA_API_KEY"],
        "api": API,
        "ending_s": _ENDING_S,
        "wait_s": WAIT_S,
    }
    words = [*ssh, host, f"python3 -c {shlex.quote(_ON_INSTANCE)}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(json.dumps(given) + "\n")
        run.stdin.flush()
        for line in run.stdout:
            print(line, end="", flush=True)
            if line.startswith("start.sh ended with"):
                fetch = [*rsync, f"{host}:job/checkpoints", f"{FOLDER}/"]
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
    with tempfile.TemporaryDirectory() as made:
        body["user_data"], public = make_host_key(Path(made))
        known = Path(made, "known_hosts")
        options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes"]
        ssh = ["ssh", *(word for option in options for word in ("-o", option))]
        (instance,) = call("instance-operations/launch", body)["instance_ids"]
        print(f"instance {instance}", flush=True)
        try:
            address = wait_for_address(instance)
            known.write_text(f"{address} {public}\n")
            code = train(instance, address, ssh, {name: os.environ[name] for name in names})
        finally:  # also when this program is interrupted; a second time does no harm
            end(instance)
    sys.exit(code)


def end(instance: str) -> None:
    """Have the instance terminated.

    Raises:
        SystemExit: Nobody has confirmed that it is.
    """
    try:
        call_until(_ENDING_S, "instance-operations/terminate", {"instance_ids": [instance]})
    except (Busy, SystemExit) as error:
        raise SystemExit(
            f"{error}\nThe instance {instance} may still run, and costs money while it does. "
            "End it by hand: https://cloud.lambda.ai/instances"
        ) from None
    print(f"instance {instance} is terminated", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Busy as busy:
        sys.exit(str(busy))

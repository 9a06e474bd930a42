"""TF_CONFIG of one worker, on stdout: `tf_config/worker-K.json` with the hosts that HOSTS names.

    HOSTS=10.0.0.1,10.0.0.2 python tf_config.py 0

Needs Python alone. Exit code 1 and one line on stderr where the hosts cannot be.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "tf_config"


def read_config(worker: str, hosts: str) -> dict[str, Any]:
    """As rendered, or with other hosts: `a,b` or `a:2222,b:2222`, the same on every worker.

    Raises:
        ValueError: What is wrong, for people.
    """
    path = FOLDER / f"worker-{worker}.json"
    if not worker.isdigit() or not path.exists():
        last = len(list(FOLDER.glob("worker-*.json"))) - 1
        raise ValueError(f"there is no worker {worker!r}: they are 0 to {last}")
    config: dict[str, Any] = json.loads(path.read_text())
    rendered: list[str] = config["cluster"]["worker"]
    if not hosts:
        return config
    named = hosts.split(",")
    if len(named) != len(rendered):
        raise ValueError(f"HOSTS names {len(named)} hosts, the plan has {len(rendered)} workers")
    port = rendered[int(worker)].rpartition(":")[2]
    addresses = [each if ":" in each else f"{each}:{port}" for each in named]
    twice = sorted({each for each in addresses if addresses.count(each) > 1})
    if twice:
        raise ValueError(f"HOSTS names {', '.join(twice)} twice")
    config["cluster"]["worker"] = addresses
    return config


def check_hosts(config: dict[str, Any]) -> None:
    """Every host has an address here.

    Raises:
        ValueError: One has none.
    """
    for address in config["cluster"]["worker"]:
        host = address.rpartition(":")[0]
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            raise ValueError(
                f"the host {host!r} is not known here: set HOSTS to the hosts of all workers, "
                "with commas, the same on each"
            ) from None


if __name__ == "__main__":
    try:
        found = read_config(sys.argv[1] if len(sys.argv) > 1 else "", os.environ.get("HOSTS", ""))
        check_hosts(found)
    except ValueError as error:
        sys.exit(f"tf_config.py: {error}")
    print(json.dumps(found))

"""What mlx.launch does not check: the hostfile, the Mac, and that every rank ended well.

    mlx_check.py hosts hosts.json --ranks 4 --backend jaccl --reach python3
    mlx_check.py mac --memory-bytes 103079215104 --rdma
    mlx_check.py run launch.log --ranks 4

Needs Python alone (`mac` on a Mac also MLX). Exit code 1 and a line on stderr for each problem.
"""

import argparse
import ipaddress
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = ipaddress.ip_network("192.0.2.0/24")
"""Addresses that are nobody's (RFC 5737): those of the hostfile as it was rendered."""

RDMA_SINCE = (26, 2)
"""macOS with RDMA over Thunderbolt 5."""


def check_hosts(path: Path, *, ranks: int, backend: str) -> Iterator[str]:
    """What is wrong with a hostfile for so many ranks."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield f"{path} cannot be read: {error}"
        return
    hosts = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(hosts, list) or not all(isinstance(each, dict) for each in hosts):
        yield f"{path} has no list of hosts"
        return
    if len(hosts) != ranks:
        yield f"hosts in {path}: {len(hosts)}, ranks of the plan: {ranks}"
    named = isinstance(found, dict) and found.get("backend")
    if named and named != backend and (named, backend) != ("ring", "mpi"):
        yield f"{path} is for the backend {named}, the plan is for {backend}"
    seen: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        addresses = host.get("ips") or []
        if not host.get("ssh"):
            yield f'host {rank} has no "ssh" name'
        if not addresses and backend != "mpi" and (backend == "ring" or rank == 0):
            yield f'host {rank} has no "ips"'
        for address in addresses:
            yield from _check_address(str(address), rank)
        names = [str(host.get("ssh")), *map(str, addresses)]
        for name in names:
            here = name in ("127.0.0.1", "None")  # several ranks of this machine
            if not here and seen.setdefault(name, rank) != rank:
                yield f"{name} is listed twice, as host {seen[name]} and host {rank}"
    if backend.startswith("jaccl"):
        yield from _check_mesh(hosts, is_ring=backend == "jaccl-ring")


_CALL = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 22), 5).close()
    except ConnectionRefusedError:
        pass  # it answered
    except OSError as error:
        print(f"{address}: {error}")
"""
"""Prints the addresses that do not answer."""

_ANSWERS_S = 60
"""For a Mac to log in and to call its peers."""


def check_reach(path: Path, *, backend: str, python: str) -> Iterator[str]:
    """Addresses of the hostfile that the Macs that call them do not reach, asked over ssh: with
    the ring every Mac calls the next one, with JACCL all call the first."""
    found = json.loads(path.read_text())
    hosts = found["hosts"] if isinstance(found, dict) else found
    calls: list[tuple[str, subprocess.Popen[str]]] = []
    for rank, host in enumerate(hosts):
        peer = hosts[(rank + 1) % len(hosts)] if backend == "ring" else hosts[0]
        addresses = [str(each) for each in peer.get("ips") or []] if peer is not host else []
        words = [python, "-c", _CALL, *addresses]
        if host["ssh"] != "127.0.0.1":
            far = " ".join(shlex.quote(word) for word in words)
            words = [
                "ssh",
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=10",
                "--",
                host["ssh"],
                far,
            ]
        pipe = subprocess.PIPE
        calls.append((host["ssh"], subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)))
    for name, call in calls:
        try:
            out, err = call.communicate(timeout=_ANSWERS_S)
        except subprocess.TimeoutExpired:
            call.kill()
            out, err = call.communicate()
            yield f"{name} does not answer within {_ANSWERS_S} s: ssh {name} true"
            continue
        if call.returncode != 0:
            said = (err.strip().splitlines() or ["no reason"])[-1]
            yield f"{name} cannot be asked: {said}; try ssh {name} true, and see Remote Login"
        for line in out.splitlines():
            yield f"{name} does not reach {line}; write an address of the same network"


def _check_address(text: str, rank: int) -> Iterator[str]:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        yield f"{text!r} of host {rank} is not an IP address"
        return
    if address in EXAMPLES:
        yield f"{text} of host {rank} is an example: write the Mac's own, or run hosts.sh"


def _check_mesh(hosts: list[dict[str, Any]], *, is_ring: bool) -> Iterator[str]:
    """Every pair that talks needs an RDMA device on both sides."""
    count = len(hosts)
    for rank, host in enumerate(hosts):
        devices = host.get("rdma") or []
        if len(devices) != count:
            yield f'host {rank} has {len(devices)} entries in "rdma", there are {count} hosts'
            continue
        if devices[rank] is not None:
            yield f'host {rank} has an RDMA device to itself; that entry of "rdma" is null'
        peers = {(rank - 1) % count, (rank + 1) % count} if is_ring else set(range(count))
        for peer in sorted(peers - {rank}):
            if not devices[peer]:
                yield f"host {rank} has no RDMA device to host {peer}: no Thunderbolt cable?"


def check_mac(*, memory_bytes: int, rdma: bool) -> Iterator[str]:
    """What this Mac lacks; nothing on another system."""
    if platform.system() != "Darwin":
        return
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2])
    if rdma and version < RDMA_SINCE:
        yield f"macOS {platform.mac_ver()[0]} has no RDMA over Thunderbolt: it is in 26.2 and newer"
    elif rdma:
        listed = subprocess.run(["ibv_devices"], capture_output=True, text=True, check=False)
        if "rdma_" not in listed.stdout:
            yield "no RDMA device: run `rdma_ctl enable` in macOS Recovery, and see `ibv_devices`"
    import mlx.core as mx

    most = int(mx.device_info()["max_recommended_working_set_size"])
    if memory_bytes > most:
        fix = f"sudo sysctl iogpu.wired_limit_mb={-(-memory_bytes // 2**20)}"
        yield f"the plan needs {memory_bytes} bytes and Metal gives {most}: {fix}"


def check_run(log: str, *, ranks: int) -> Iterator[str]:
    """What shows in the output of all ranks that not every one ended well. mlx.launch itself ends
    with 0 when ranks die."""
    ended = {int(rank): int(code) for rank, code in re.findall(r"rank (\d+) ended with (\d+)", log)}
    for rank in range(ranks):
        if rank not in ended:
            yield f"rank {rank} never said how it ended: it was killed, or not started"
        elif ended[rank]:
            yield f"rank {rank} ended with exit code {ended[rank]}"
    ends = [json.loads(each) for each in re.findall(r'\{[^{}]*"sha256"[^{}]*\}', log)]
    if not ends:  # your own program
        return
    if sorted(end["rank"] for end in ends) != list(range(ranks)):
        yield f"{len(ends)} of {ranks} ranks gave a hash"
    sizes = {end["world_size"] for end in ends}
    if sizes != {ranks}:
        yield f"ranks counted {sorted(sizes)} ranks in all, the plan has {ranks}"
    if len({end["sha256"] for end in ends}) > 1:
        yield "the parameters of the ranks differ at the end"


def main() -> None:
    """Print what is wrong."""
    parser = argparse.ArgumentParser(description="What mlx.launch does not check.")
    checks = parser.add_subparsers(dest="check", required=True)
    hosts = checks.add_parser("hosts")
    hosts.add_argument("file", type=Path)
    hosts.add_argument("--ranks", type=int, required=True)
    hosts.add_argument("--backend", required=True)
    hosts.add_argument("--reach", metavar="PYTHON", help="of every Mac, which calls its peers")
    mac = checks.add_parser("mac")
    mac.add_argument("--memory-bytes", type=int, required=True)
    mac.add_argument("--rdma", action="store_true")
    run = checks.add_parser("run")
    run.add_argument("log", type=Path)
    run.add_argument("--ranks", type=int, required=True)
    asked = parser.parse_args()
    if asked.check == "hosts":
        problems = list(check_hosts(asked.file, ranks=asked.ranks, backend=asked.backend))
        if asked.reach and not problems:
            problems += check_reach(asked.file, backend=asked.backend, python=asked.reach)
    elif asked.check == "mac":
        problems = check_mac(memory_bytes=asked.memory_bytes, rdma=asked.rdma)
    else:
        problems = check_run(asked.log.read_text(errors="replace"), ranks=asked.ranks)
    found = list(problems)
    for each in found:
        print(f"{asked.check}: {each}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

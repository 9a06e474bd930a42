"""Hosts that are not there: a network namespace each, on a bridge of this machine.

A host has its own address and its own interface, and can be cut off. Files, processes and
`/dev/shm` are this machine's: what is on a host only is not tested by them. Needs root and
`ip netns`.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def can_make_hosts() -> bool:
    """Whether this machine lets us."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        return False
    name = f"pl{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


def ip(*arguments: str) -> None:
    """`ip` with these arguments, or an error."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """So many hosts, and this machine as `.1` of their network."""

    def __init__(self, num: int, *, subnet: str) -> None:
        """
        Args:
            subnet: First three numbers of the addresses.
        """
        self.num = num
        self._subnet = subnet
        self._tag = f"pl{secrets.token_hex(3)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def here(self) -> str:
        """This machine's address."""
        return f"{self._subnet}.1"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{10 + host}"

    def up(self) -> None:
        """Make them."""
        bridge = f"{self._tag}b"
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.here}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in range(self.num):
            space, link = self._space(host), self._link(host)
            ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def down(self) -> None:
        """Take away the hosts, and every process that is on one."""
        for process in self._processes:
            process.kill()
            process.wait()
        for host in range(self.num):
            self.kill_all(host)
        links = [("link", "del", self._link(host)) for host in range(self.num)]
        spaces = [("netns", "del", self._space(host)) for host in range(self.num)]
        for gone in [*links, *spaces, ("link", "del", f"{self._tag}b")]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*gone)

    def on(self, host: int, *words: str) -> list[str]:
        """The command that runs these words there."""
        return ["nsenter", f"--net=/var/run/netns/{self._space(host)}", *words]

    def start(self, host: int, words: Sequence[str], log: Path) -> None:
        """A process there that stays in the foreground; it ends with the hosts."""
        with log.open("ab") as file:
            self._processes.append(
                subprocess.Popen(
                    self.on(host, *words), stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
            )

    def cut(self, host: int) -> None:
        """Nobody reaches it, and it reaches nobody."""
        ip("link", "set", self._link(host), "down")

    def processes(self, host: int) -> list[int]:
        """Ids of all that are there, however they came."""
        done = subprocess.run(
            ["ip", "netns", "pids", self._space(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in done.stdout.split()]

    def kill_all(self, host: int) -> None:
        """As if its power went: every process there is killed, until there is none."""
        deadline = time.monotonic() + 10
        while (pids := self.processes(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _space(self, host: int) -> str:
        return f"{self._tag}n{host}"

    def _link(self, host: int) -> str:
        return f"{self._tag}v{host}"

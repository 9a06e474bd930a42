"""Hosts over ssh as a place: an agent each, and the controller here.

Nothing that a person names reaches a shell unquoted, neither here (no shell is started) nor there
(every word is quoted for the login shell). The secret that agents are known by goes through ssh's
standard input.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.control.network import address_toward
from paceline.errors import JobError, Problem
from paceline.job import Job, Script, SshSpec
from paceline.job.hosts import check_slots, find_hosts
from paceline.launch.hosts import Hosts, HostSite, check_hosts, starts_of
from paceline.launch.places import Inspection, Start
from paceline.launch.tools import check_tool
from paceline.plan import Plan
from paceline.record.run import RunFolder
from paceline.units import counted

_UNREACHED = 255
"""What ssh itself ends with when it gets nowhere; ssh(1), EXIT STATUS."""

_ALIVE_EVERY_S = 5
_ALIVE_COUNT = 6
"""After half a minute of silence ssh gives up a connection. The controller knows before, by its own
beats; this is for the process that would stay. A guess."""

_START_S = 45.0
"""Beyond connecting, for the login shell and Python to start there. A guess: a busy file server."""

INSTALL_SSH = "install OpenSSH's client on this machine"

_CARRIED = ("PYTHONPATH",)
"""Environment variables that the hosts' Python needs before it can read anything."""


@dataclass(frozen=True, slots=True)
class Ssh:
    """The way to a host by ssh(1)."""

    spec: SshSpec
    folder: Path

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        spec = self.spec
        options = [
            *("-o", "BatchMode=yes"),  # nobody is asked for a password
            *("-o", f"ConnectTimeout={max(1, round(spec.connect_timeout))}"),
            *("-o", f"ServerAliveInterval={_ALIVE_EVERY_S}"),
            *("-o", f"ServerAliveCountMax={_ALIVE_COUNT}"),
            *("-o", "ForwardX11=no", "-o", "RequestTTY=no"),
        ]
        if spec.config is not None:
            options += ["-F", str(self.folder / spec.config)]
        if spec.port is not None:
            options += ["-p", str(spec.port)]
        if spec.identity is not None:
            identity = self.folder / Path(spec.identity).expanduser()
            options += ["-i", str(identity), "-o", "IdentitiesOnly=yes"]
        return ["ssh", *options, "--", host, shlex.join(words)]

    def is_unreached(self, returncode: int) -> bool:
        return returncode == _UNREACHED

    def python(self, module: str, *words: str) -> list[str]:
        carried = [f"{name}={os.environ[name]}" for name in _CARRIED if os.environ.get(name)]
        return ["env", *carried, self.spec.python or sys.executable, "-m", module, *words]

    @property
    def minds_end(self) -> bool:
        return True

    @property
    def patience_s(self) -> float:
        return self.spec.connect_timeout + _START_S


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    """What keeps the job from running there; no host is asked."""
    spec = job.spec.ssh
    yield from check_tool("ssh", fix=INSTALL_SSH)
    try:
        hosts = find_hosts(job)
    except JobError as error:
        yield from error.problems
        return
    if plan is None or isinstance(job, Script):
        if not hosts:
            yield Problem(
                code="W008",
                what="no host is named",
                where="--hosts",
                fix="name hosts: --hosts node-a,node-b, or a hostfile",
            )
        return
    yield from check_slots(job, plan.cluster.ranks_per_node)
    if len(hosts) < plan.cluster.num_nodes:
        yield Problem(
            code="W008",
            what=f"the plan has {counted(plan.cluster.num_nodes, 'node')}, the job names "
            f"{counted(len(hosts), 'host')}",
            where=job.where("ssh.hostfile" if spec.hostfile else "ssh.hosts"),
            fix="name more hosts (--hosts node-a,node-b)"
            + (f", or set cluster.nodes to {len(hosts)}" if hosts else ""),
        )


def starts(job: Job, plan: Plan, run: RunFolder) -> list[Start]:
    names = [host for host, _ in find_hosts(job)]
    return starts_of(Ssh(job.spec.ssh, job.folder), run, names[: plan.cluster.num_nodes])


def open_site(
    job: Job,
    plan: Plan,
    run: RunFolder,
    on_note: Callable[[str], None],
    inspection: Inspection | None,
) -> HostSite:
    names = tuple(host for host, _ in find_hosts(job))
    way = Ssh(job.spec.ssh, job.folder)
    hosts = Hosts(run=run, names=names, num_nodes=plan.cluster.num_nodes, way=way, place="ssh")
    check_hosts(hosts, on_note, inspection)
    return HostSite(hosts, _address(job, names[0]))


def _address(job: Job, host: str) -> str:
    asked = job.spec.ssh.address
    if asked != "auto":
        return asked
    name = host.rpartition("@")[2]
    try:
        return address_toward(name)
    except OSError as error:
        raise JobError.of(
            code="W003",
            what=f"the way to {name} is not known here, so the controller's address is not "
            f"either: {error.strerror or error}",
            where=job.where("ssh.address"),
            fix="set ssh.address to the address of this machine that the hosts reach",
        ) from None

"""The machines on which a script's launcher is started once each (`starts: nodes`), and the command
that starts it there.

Leaves out the launcher's own life on its node (`on_node.py`) and restarts (`script_run.py`).
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from paceline.errors import JobError, Problem
from paceline.job import Script
from paceline.job.hosts import find_hosts
from paceline.launch import ray, srun, ssh
from paceline.launch.hosts import Hosts, check_hosts
from paceline.launch.node_commands import Here, Way
from paceline.launch.tools import ask_tool, check_tool
from paceline.record.run import RunFolder
from paceline.units import counted

PLACES = ("local", "ssh", "srun", "ray")
"""Attached places whose nodes a launcher is started on."""

_FIRST_PORT, _NUM_PORTS = 20000, 12768
"""20000 to 32767: above what services use, below where Linux takes ports for connections that it
opens (32768, net.ipv4.ip_local_port_range)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramNodes:
    """The nodes of one run, in order."""

    names: tuple[str, ...]
    way: Way
    head: str
    """Address of the first, as the others reach it."""

    def command(
        self,
        script: Script,
        run: str,
        node: int,
        *,
        attempt: int,
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """What to run here so that the launcher runs on a node.

        Args:
            attempt: Each meets at a port and under a name of its own.
        """
        environment = {**given, **script.spec.environment}
        words = self.way.python(
            "paceline.launch.on_node",
            *("--run", run, "--folder", str(script.folder)),
            *("--node", str(node), "--nodes", str(len(self.names))),
            *("--head", self.head, "--port", str(port_of(run, attempt))),
            *("--attempt", str(attempt), f"--grace={script.spec.recovery.grace:g}"),
            *(f"--env={name}={value}" for name, value in environment.items()),
            *("--", *script.spec.command),
        )
        return self.way.command(self.names[node], words)


def port_of(run: str, attempt: int) -> int:
    """Port at which the nodes of an attempt meet: runs that share a machine rarely have the same.

    >>> port_of("/runs/a", 1) != port_of("/runs/a", 2)
    True
    """
    return _FIRST_PORT + zlib.crc32(f"{run} {attempt}".encode()) % _NUM_PORTS


def check_place(script: Script, place: str) -> Iterator[Problem]:
    """What keeps a launcher from being started at a place; asks no other machine."""
    nodes = script.spec.nodes
    if place == "ssh":
        try:
            hosts = find_hosts(script)
        except JobError as error:
            yield from error.problems
            return
        yield from check_tool("ssh", fix=ssh.INSTALL_SSH)
        if len(hosts) < nodes:
            yield Problem(
                code="W008",
                what=f"the run has {counted(nodes, 'node')}, the job names "
                f"{counted(len(hosts), 'host')}",
                where=f"ssh.hosts, {script.source}",
                fix="name more hosts (--hosts node-a,node-b)",
            )
    elif place == "local" and nodes > 1:
        yield Problem(
            code="H024",
            what=f"this machine is one node, and the run has {nodes}",
            where=f"cluster.nodes, {script.source}",
            fix="give a place that has them: --on slurm, ssh, srun, ray or kubernetes",
        )


def planned_nodes(script: Script, place: str) -> ProgramNodes:
    """The nodes as far as the job alone tells, for a dry run; asks nobody."""
    spec = script.spec
    if place == "ssh":
        names = [host for host, _ in find_hosts(script)][: spec.nodes]
    else:
        names = [f"{place.upper()}-NODE-{node}" for node in range(spec.nodes)]
    way = _way(script, place)
    if isinstance(way, ray.Through):  # as of a cluster that has GPUs
        way = replace(way, gpus=float(spec.processes))
    return ProgramNodes(names=tuple(names), way=way, head="HEAD-ADDRESS")


def find_nodes(
    script: Script, run: RunFolder, place: str, on_note: Callable[[str], None]
) -> ProgramNodes:
    """The nodes of a run; each is visited, and has the run's folder and this Paceline.

    Raises:
        JobError: There are too few, or one cannot take part.
    """
    JobError.raise_for(check_place(script, place))
    if place == "ssh":
        found = _ssh_nodes(script)
    elif place == "srun":
        found = _srun_nodes(script)
    else:
        found = _ray_nodes(script)
    hosts = Hosts(
        run=run, names=found.names, num_nodes=len(found.names), way=found.way, place=place
    )
    check_hosts(hosts, on_note)
    return found


def _ssh_nodes(script: Script) -> ProgramNodes:
    way = _way(script, "ssh")
    names = tuple(host for host, _ in find_hosts(script))[: script.spec.nodes]
    return ProgramNodes(names=names, way=way, head=_name_behind(way.command(names[0], [])))


def _name_behind(command: Sequence[str]) -> str:
    """What ssh would connect to: a host may be an alias of its configuration.

    `ssh -G` prints its configuration and connects to nothing (ssh(1), OpenSSH 6.8).
    """
    *options, _, host, _ = command[1:]
    done = ask_tool(["ssh", "-G", *options, "--", host])
    named = (line.partition(" ")[2] for line in done.stdout.splitlines() if line[:9] == "hostname ")
    return next(named, host.rpartition("@")[2])


def _srun_nodes(script: Script) -> ProgramNodes:
    names = _first(script, srun.node_names(), "the allocation has")
    return ProgramNodes(names=names, way=_way(script, "srun"), head=srun.address_of(names[0]))


def _ray_nodes(script: Script) -> ProgramNodes:
    ranks, found = script.spec.processes, ray.find_nodes(script.spec.ray.address)
    has_gpus = any(node.gpus for node in found)
    able = [node for node in found if (node.gpus if has_gpus else node.cpus) >= ranks]
    kind = "GPUs" if has_gpus else "CPUs"
    names = _first(script, [node.name for node in able], f"of Ray's nodes with {ranks} {kind} are")
    kept = (0.0, float(ranks)) if has_gpus else (float(ranks), 0.0)
    way = replace(_ray_way(script), cpus=kept[0], gpus=kept[1])
    return ProgramNodes(names=names, way=way, head=able[0].address)


def _first(script: Script, names: Sequence[str], what: str) -> tuple[str, ...]:
    """As many as the run has nodes.

    Raises:
        JobError: `W008`, there are fewer.
    """
    nodes = script.spec.nodes
    if len(names) < nodes:
        raise JobError.of(
            code="W008",
            what=f"the run has {counted(nodes, 'node')}, {what} {len(names)}",
            where=f"nodes, {script.source}",
            fix=f"ask for {counted(nodes, 'node')}, or run on fewer: cluster.nodes in the job",
        )
    return tuple(names[:nodes])


def _way(script: Script, place: str) -> Way:
    spec = script.spec
    if place == "ssh":
        return ssh.Ssh(spec.ssh, script.folder)
    if place == "srun":
        return srun.Srun(spec.slurm.python or sys.executable)
    return _ray_way(script) if place == "ray" else Here()


def _ray_way(script: Script) -> ray.Through:
    spec = script.spec.ray
    return ray.Through(0.0, 0.0, spec.python or sys.executable, spec.address)

"""A real Slurm of several nodes on this machine: each node's slurmd in a network namespace.

All of it is private: folders, munge's key and socket, ports, configuration (`SLURM_CONF`). Nodes
are known by address, so `/etc/hosts` is left alone. Needs root, slurm-wlm and munge.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.engines.networks import Hosts

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "nsenter")

CONFIG = """\
ClusterName=paceline
SlurmctldHost={name}({here})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={box}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={box}/state
SlurmctldPidFile={box}/slurmctld.pid
SlurmctldLogFile={box}/slurmctld.log
SlurmdPidFile={box}/slurmd-%n.pid
SlurmdSpoolDir={box}/spool/%n
SlurmdLogFile={box}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
KillWait=10
MinJobAge=600
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=2,sched_min_interval=100000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName=node{n} NodeHostname={name} NodeAddr={address} Port={port} CPUs=2 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN\n"
)
"""`cred_expire` is how long a lost job waits before it starts again; 130 s by default."""


def what_is_missing() -> str | None:
    """The first command that is not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return next((name for name in COMMANDS if shutil.which(name, path=path) is None), None)


def versions() -> dict[str, str]:
    """Of the Slurm that is installed."""
    if what_is_missing() is not None:
        return {}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    daemon = shutil.which("slurmctld", path=path) or "slurmctld"
    done = subprocess.run([daemon, "-V"], capture_output=True, text=True, check=True)
    return {"slurm": done.stdout.split()[-1]}


class SlurmCluster:
    """Its nodes are `node0`, `node1`, ..."""

    def __init__(self, hosts: Hosts, box: Path) -> None:
        self.hosts = hosts
        self.box = box

    @property
    def environment(self) -> dict[str, str]:
        """Of every command that talks to it."""
        return {"SLURM_CONF": f"{self.box}/slurm.conf"}

    def up(self) -> None:
        """Start everything, and wait until every node is idle."""
        self.hosts.up()
        for name in ("state", "spool"):
            (self.box / name).mkdir(parents=True)
        self.box.chmod(0o755)
        key = self.box / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self._run(
            *("munged", f"--key-file={key}", f"--socket={self.box}/munge.socket", "--force"),
            *(f"--pid-file={self.box}/munged.pid", f"--log-file={self.box}/munged.log"),
            f"--seed-file={self.box}/munge.seed",
        )
        name = socket.gethostname().partition(".")[0]
        with socket.create_server((self.hosts.here, 0)) as free:
            port = free.getsockname()[1]
        text = CONFIG.format(name=name, here=self.hosts.here, box=self.box, port=port)
        nodes = [
            NODE.format(n=n, name=name, address=self.hosts.address(n), port=17900 + n)
            for n in range(self.hosts.num)
        ]
        lines = text.splitlines(keepends=True)
        (self.box / "slurm.conf").write_text("".join([*lines[:-1], *nodes, lines[-1]]))
        self._run("slurmctld", "-c")
        for node in range(self.hosts.num):
            self._run(*self.hosts.on(node, "slurmd", "-N", f"node{node}"))
        self._wait_for_idle()

    def down(self) -> None:
        """End everything. What is left is in `box`."""
        for name in ("slurmctld", *(f"slurmd-node{n}" for n in range(self.hosts.num)), "munged"):
            self._end(self.box / f"{name}.pid")
        self.hosts.down()

    def say(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | self.environment
        )
        return done.stdout + done.stderr

    def lose(self, node: int) -> None:
        """As if its power went: its network first, so that nothing can say goodbye."""
        self.hosts.cut(node)
        self.hosts.kill_all(node)

    def _run(self, *command: str) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        environment = os.environ | self.environment | {"PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _wait_for_idle(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            states = self.say("sinfo", "--noheader", "--Node", "--format=%T").split()
            if states == ["idle"] * self.hosts.num:
                return
            time.sleep(0.2)
        raise AssertionError(f"Slurm is not up: {self.say('sinfo', '-N', '-l')}")

    def _end(self, pid_file: Path) -> None:
        try:
            pid = int(pid_file.read_text())
            os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            return
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)

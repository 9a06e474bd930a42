"""`paceline run --on ssh` with a real sshd on each of several hosts.

The hosts are network namespaces of this machine; keys and configuration are the test's own, and
sshd listens in the namespaces only.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.networks import Hosts, can_make_hosts
from tests.run.scene import Record, Scene, is_alive, wait_until

from paceline.control.failover import replay
from paceline.control.host_agents import agents_here
from paceline.record import events as log

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not (can_make_hosts() and Path(SSHD).exists() and shutil.which("ssh-keygen")),
        reason="NOT TESTED: ssh needs root, ip netns and sshd (apt-get install openssh-server)",
    ),
]

CONFIG = """\
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/login.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv SHLVL=2
"""
"""The last line keeps Debian's bash from reading ~/.bashrc, which is this machine's and not the
test's: it has taken a minute here."""


def versions() -> dict[str, str]:
    """Of the OpenSSH that is installed."""
    done = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False)
    return {"openssh": done.stderr.partition("_")[2].split(" ")[0].rstrip(",")}


VERSIONS = versions() if shutil.which("ssh") else {}
RUNS = (
    *("--set", "cluster.nodes=2", "--set", "train.global_batch=8"),
    *("--set", "recovery.lease=6", "--set", "recovery.grace=2", "--set", "recovery.heartbeat=1"),
)


class Cluster:
    """Hosts with sshd, and what ssh has to know of them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder

    def up(self) -> None:
        self.hosts.up()
        self.folder.mkdir()
        for name in ("host", "login"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*command, str(self.folder / name)], check=True)
        known = (self.folder / "host.pub").read_text()
        addresses = [self.hosts.address(host) for host in range(self.hosts.num)]
        (self.folder / "known").write_text("".join(f"{each} {known}" for each in addresses))
        (self.folder / "config").write_text(
            f"Host *\n  UserKnownHostsFile {self.folder}/known\n"
            f"  IdentityFile {self.folder}/login\n  IdentitiesOnly yes\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)

    def serve(self, host: int, before: str = "", *, variables: str = "") -> None:
        """Start a host's sshd, after some shell commands of its own.

        Args:
            host: Its number.
            before: Shell commands, each with its `;`.
            variables: That logins there have, as `NAME=value`.
        """
        config = self.folder / f"sshd-{host}"
        text = CONFIG.format(address=self.hosts.address(host), keys=self.folder)
        config.write_text(text.replace("SetEnv SHLVL=2", f"SetEnv SHLVL=2 {variables}"))
        words = ["sh", "-c", f"{before} exec {SSHD} -D -e -f {config}"]
        unshared = ["unshare", "--mount", *words] if before else words
        self.hosts.start(host, unshared, self.folder / f"sshd-{host}.log")
        wait_until(lambda: self._answers(host), what=f"sshd on host {host}", timeout_s=20)

    def options(self, *hosts: int) -> tuple[str, ...]:
        names = ",".join(self.hosts.address(host) for host in hosts)
        config = f"ssh.config={self.folder}/config"
        return "--on", "ssh", "--hosts", names, "--set", config, "--set", "ssh.connect_timeout=3"

    def _answers(self, host: int) -> bool:
        words = ["ssh", "-F", f"{self.folder}/config", "-o", "BatchMode=yes"]
        done = subprocess.run(
            [*words, self.hosts.address(host), "true"], capture_output=True, check=False
        )
        return done.returncode == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(Hosts(3, subnet="10.213.78"), tmp_path / "ssh")
    try:
        made.up()
        yield made
    finally:
        made.hosts.down()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("ssh") / "a folder with spaces; and more")


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    """The same layout on this machine, undisturbed."""
    return scene.run("clean", *RUNS, "--set", "train.steps=60")


def run_until(
    scene: Scene, out: str, words: tuple[str, ...], step: int, act: Callable[[], None]
) -> Record:
    """Start it, do something once this step is through, and wait for its end."""
    started = scene.start(out, *RUNS, "--set", "train.steps=60", "--no-report", *words)
    record = scene.record(out)
    try:
        wait_until(
            lambda: (
                started.poll() is not None
                or (
                    (scene.folder / out / "metrics.jsonl").exists()
                    and record.metrics[-1:]
                    and record.metrics[-1].step >= step
                )
            ),
            what=f"step {step}",
        )
        assert started.poll() is None, started.communicate()[0] + scene.logs(out)
        act()
        said, _ = started.communicate(timeout=150)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
    assert started.returncode == 0, said + scene.logs(out)
    return scene.record(out, said)


@pytest.mark.engine(
    "ssh", versions=VERSIONS, ran="2 hosts x 2 ranks by OpenSSH; one host's agent killed: same bits"
)
def test_a_killed_agent_of_another_host_costs_no_bit(scene, clean, cluster):
    for host in range(2):
        cluster.serve(host)
    run = scene.folder / "killed"
    pids: list[int] = []

    def kill() -> None:
        pids.extend(agents_here(run, node=1, host=cluster.hosts.address(1)))
        assert set(pids) <= set(cluster.hosts.processes(1))
        token = replay(run / "journal").memory.token
        assert token not in b"".join(_command_lines()).decode("utf-8", "replace")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    record = run_until(scene, "killed", cluster.options(0, 1), 5, kill)
    assert len(pids) == 1
    assert record.finished.outcome == "finished"
    assert record.digest == clean.digest
    assert record.samples == clean.samples
    assert record.of(log.WorkerLost)[0].node == 1
    workers = record.of(log.WorkerStarted)
    assert {each.node for each in workers} == {0, 1}
    assert not any(is_alive(each.pid) for each in workers)


@pytest.mark.engine(
    "ssh",
    versions=VERSIONS,
    ran="a host cut off in mid-run, a spare host takes its place: same bits",
)
def test_a_host_that_is_cut_off_loses_its_node_to_a_spare_host(scene, clean, cluster):
    for host in range(3):
        cluster.serve(host)
    record = run_until(scene, "cut", cluster.options(0, 1, 2), 5, lambda: cluster.hosts.cut(1))
    assert record.finished.outcome == "finished"
    assert record.finished.exactness == "bitwise"
    assert record.digest == clean.digest
    assert record.samples == clean.samples
    hosts = (scene.folder / "cut" / "place.json").read_text()
    assert cluster.hosts.address(2) in hosts
    assert cluster.hosts.address(1) not in hosts


def test_hosts_that_cannot_take_part_are_refused_by_name(scene, cluster):
    away = "mount -t tmpfs none " + _quoted(scene.folder) + ";"
    cluster.serve(0)
    cluster.serve(1, before=away)
    done = scene.paceline(
        *("run", "job.yaml", "--out", "refused", "--set", "cluster.nodes=3"),
        *("--set", "train.global_batch=12", *cluster.options(0, 1, 2)),
    )
    assert done.returncode == 2, done.stdout + done.stderr
    names = [cluster.hosts.address(host) for host in range(3)]
    assert f"W005: {names[1]} does not see the run's folder" in done.stderr
    assert f"W004: {names[2]} cannot be reached" in done.stderr
    assert names[0] not in done.stderr


def _command_lines() -> Iterator[bytes]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "cmdline").read_bytes()
        except OSError:
            continue


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))

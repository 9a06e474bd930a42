"""Two nodes in network namespaces of their own, and the way between them cut.

Whatever is cut, the ranks of the node that nobody can reach are given away only after that node has
ended its workers, and the run ends with the same bits. Needs root and `ip netns`.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from tests.run.by_hand import Remote, control
from tests.run.scene import Record, Scene, is_alive

from paceline.control import messages as say
from paceline.control.controller import Progress
from paceline.control.failover import Memory
from paceline.record import events as log
from paceline.record.run import RunFolder

SUBNET = "10.213.77"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_cut() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        return False
    try:
        ip("netns", "add", "plprobe")
        ip("netns", "del", "plprobe")
    except subprocess.CalledProcessError:
        return False
    return True


pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not can_cut(), reason="NOT TESTED: partitions need root and ip netns"),
]


class Network:
    """A bridge with the controller, and a namespace for each of two nodes."""

    def __init__(self) -> None:
        self._tag = f"pl{secrets.token_hex(3)}"
        self._bridge = f"{self._tag}b"

    def space(self, node: int) -> str:
        return f"{self._tag}n{node}"

    def up(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{SUBNET}.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for node in range(2):
            space, link = self.space(node), f"{self._tag}v{node}"
            ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", link, "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{SUBNET}.{2 + node}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def down(self) -> None:
        for gone in (
            ("route", "del", "blackhole", f"{SUBNET}.3/32"),
            ("link", "del", f"{self._tag}v0"),
            ("link", "del", f"{self._tag}v1"),
            ("netns", "del", self.space(0)),
            ("netns", "del", self.space(1)),
            ("link", "del", self._bridge),
        ):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*gone)

    def agents(self, run: RunFolder) -> Remote:
        return Remote(
            run,
            prefix=lambda node: ("nsenter", f"--net=/var/run/netns/{self.space(node)}"),
            environment=lambda node: {
                "PACELINE_HOST": f"{SUBNET}.{2 + node}",
                "GLOO_SOCKET_IFNAME": "eth0",
            },
        )

    def cut_link(self) -> None:
        """Node 1 reaches nobody, and nobody reaches it."""
        ip("link", "set", f"{self._tag}v1", "down")

    def cut_routes(self) -> None:
        """The same by routes: nothing is refused, all of it vanishes."""
        self.cut_one_way()
        ip("route", "add", "blackhole", f"{SUBNET}.3/32")
        ip("-n", self.space(0), "route", "add", "blackhole", f"{SUBNET}.3/32")

    def cut_one_way(self) -> None:
        """Node 1 hears everybody, and nobody hears it."""
        for host in (1, 2):
            ip("-n", self.space(1), "route", "add", "blackhole", f"{SUBNET}.{host}/32")

    def cut_controller(self) -> None:
        """Only the controller and node 1 do not reach each other."""
        ip("-n", self.space(1), "route", "add", "blackhole", f"{SUBNET}.1/32")
        ip("route", "add", "blackhole", f"{SUBNET}.3/32")


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("partition"))


SETTINGS = (
    "cluster.nodes=2",
    "cluster.per_node=1",
    "train.steps=300",
    "checkpoint.every=100",
    "evaluate.every=100",
    "recovery.spares=2",
    "recovery.lease=24",  # a busy machine lets nobody run for seconds, and only node 1 is cut off
    "recovery.grace=2",
    "recovery.heartbeat=15",
)


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    return scene.run("clean", *(part for each in SETTINGS for part in ("--set", each)))


class Deaths(threading.Thread):
    """When processes ended, by looking."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at: dict[int, float] = {}
        self.watched: list[int] = []

    def run(self) -> None:
        while True:
            for pid in self.watched:
                if pid not in self.at and not is_alive(pid):
                    self.at[pid] = time.time()
            time.sleep(0.02)


@pytest.mark.repeat  # that no rank is held twice is in `tests/control/test_core_properties.py`
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("cut_link", marks=pytest.mark.slow),
        pytest.param("cut_routes", marks=pytest.mark.slow),
        "cut_one_way",
        pytest.param("cut_controller", marks=pytest.mark.slow),
    ],
)
def test_a_cut_network_never_has_two_sides_that_go_on(scene, clean, network, way):
    deaths = Deaths()
    deaths.start()

    def cut_once(memory: Memory, progress: Progress) -> None:
        workers = memory.state.workers.values()
        spares = [each for each in workers if each.rank is None and each.waits]
        if isinstance(progress.message, say.StepDone) and len(spares) == 2 and not deaths.watched:
            deaths.watched = [each.pid for each in workers if each.node == 1 and each.pid]
            getattr(network, way)()

    run = control(
        scene,
        way,
        SETTINGS,
        host=f"{SUBNET}.1",
        make_agents=network.agents,
        on_progress=cut_once,
    )
    assert deaths.watched, "the run was through before it could be cut"
    assert run.finished.outcome == "finished", run.story
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    # On a busy machine rank 0 may see its connection end before the lease of node 1 does.
    assert ("node 1 is lost", 1) in [(each.how, each.rank) for each in run.of(log.WorkerLost)]
    # Nobody was given its ranks while one of its workers lived.
    second = run.of(log.TrainingStarted)[1]
    assert all(deaths.at[pid] < second.at for pid in deaths.watched)

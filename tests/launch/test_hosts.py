"""Agents on hosts that are reached, are not, or are lost; the way there is a pretended one."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.run.scene import is_alive, wait_until

import paceline
from paceline.control.controller import AgentAddress
from paceline.control.host_agents import agents_here
from paceline.errors import JobError, Problem
from paceline.launch.hosts import HostAgents, Hosts, check_hosts
from paceline.launch.places import Inspection
from paceline.record.placement import read_placement
from paceline.record.run import RunFolder
from paceline.topology.node.facts import Gathered, Question

UNREACHED = 255
AGENT = "import sys, time; print('token', sys.stdin.readline(), flush=True); time.sleep(60)"


@dataclass
class Pretended:
    """Every host is this machine; those that are down are not reached."""

    down: set[str] = field(default_factory=set)
    here: str = ""
    """Shell commands before a visit."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        if host in self.down:
            return ["sh", "-c", f"echo no route to {host} >&2; exit {UNREACHED}"]
        return ["sh", "-c", f'{self.here} exec "$@"', "sh", *words]

    def is_unreached(self, returncode: int) -> bool:
        return returncode == UNREACHED

    def python(self, module: str, *words: str) -> list[str]:
        if module == "paceline.control.agent":
            return [sys.executable, "-c", AGENT, module, *words]
        return [sys.executable, "-m", module, *words]

    @property
    def patience_s(self) -> float:
        return 30.0

    @property
    def minds_end(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "a run")
    made.logs.mkdir(parents=True)
    return made


@pytest.fixture
def way() -> Pretended:
    return Pretended()


@pytest.fixture
def hosts(run: RunFolder, way: Pretended) -> Hosts:
    return Hosts(run=run, names=("a", "b", "spare"), num_nodes=2, way=way, place="ssh")


@pytest.fixture
def agents(hosts: Hosts) -> Iterator[HostAgents]:
    made = HostAgents(hosts)
    yield made
    hosts.end_all()
    made.end()


def address(node: int) -> AgentAddress:
    return AgentAddress(node, "127.0.0.1:1", "a secret")


def agent_on(run: RunFolder, host: str) -> int:
    found: list[int] = wait_until(
        lambda: agents_here(run.path, host=host), what=f"an agent on {host}"
    )
    (pid,) = found
    return pid


def test_an_agent_gets_its_secret_by_its_standard_input_alone(run, agents):
    agents.start(address(0))
    pid = agent_on(run, "a")
    log = run.logs / "agent-0.log"
    wait_until(lambda: "token a secret" in log.read_text(), what="its first line")
    assert b"a secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"a secret" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_an_agent_that_is_killed_is_gone_once_its_host_says_so(run, agents):
    agents.start(address(1))
    pid = agent_on(run, "b")
    assert not agents.is_gone(1, pid)
    agents.kill(1, pid)
    wait_until(lambda: agents.is_gone(1, pid), what="the answer")
    assert not is_alive(pid)


def test_a_host_is_asked_once_a_second_whether_an_agent_is_gone(agents, monkeypatch):
    asked_s: list[float] = []
    now = SimpleNamespace(s=100.0)

    def ask(*_: object, **__: object) -> bool:
        asked_s.append(now.s)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(Hosts, "is_gone", ask)
        patched.setattr("paceline.launch.hosts.time", SimpleNamespace(monotonic=lambda: now.s))
        for now.s in (100.0, 100.5, 101.0):
            assert not agents.is_gone(1, 7)
            for thread in threading.enumerate():
                if thread.name == "paceline-is-gone":
                    thread.join()
    assert asked_s == [100.0, 101.0]


def test_the_agent_of_another_run_or_host_is_left_alone(run, agents, hosts):
    agents.start(address(1))
    pid = agent_on(run, "b")
    assert hosts.is_gone(1, "a", 0, end=True)
    assert hosts.is_gone(0, "b", 0, end=True)
    assert is_alive(pid)


def test_a_node_whose_host_is_not_reached_any_more_goes_to_a_spare_host(run, agents, way):
    agents.start(address(1))
    pid = agent_on(run, "b")
    way.down.add("b")
    agents.kill(1, pid)
    agents.start(address(1))
    agent_on(run, "spare")
    assert not agents.is_gone(1, pid)  # nobody has seen it end
    placement = read_placement(run.path)
    assert placement is not None
    assert placement.hosts == {0: "a", 1: "spare"}


def test_the_next_controller_knows_where_each_node_is(run, hosts, agents, way):
    way.down.add("b")
    agents.start(address(1))
    pid = agent_on(run, "spare")
    another = HostAgents(hosts)
    another.kill(1, pid)
    wait_until(lambda: another.is_gone(1, pid), what="the answer")
    another.end()


def test_no_spare_is_taken_from_a_host_that_only_lost_its_agent(run, agents):
    agents.start(address(0))
    pid = agent_on(run, "a")
    agents.kill(0, pid)
    agents.start(address(0))
    wait_until(
        lambda: agents_here(run.path, node=0, host="a") not in ([], [pid]), what="the next one"
    )
    assert not agents_here(run.path, host="spare")


def test_hosts_that_are_fine_are_not_spoken_of(hosts):
    said: list[str] = []
    check_hosts(hosts, said.append)
    assert said == []
    assert not list(hosts.run.path.glob(".paceline-*"))


def test_a_host_that_is_not_reached_is_named_with_its_last_words(hosts, way):
    way.down.add("b")
    with pytest.raises(JobError) as refused:
        check_hosts(hosts, print)
    (problem,) = refused.value.problems
    assert (problem.code, problem.what) == ("W004", "b cannot be reached: no route to b")


def test_a_host_with_another_paceline_is_named(hosts, way, tmp_path):
    source = Path(paceline.__file__).parent
    other = tmp_path / "other" / "paceline"
    other.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (other / path.name).symlink_to(path)
    (other / "__init__.py").write_text('__version__ = "0.0.9"\n')
    way.here = f"export PYTHONPATH={other.parent} PYTHONDONTWRITEBYTECODE=1;"
    with pytest.raises(JobError, match=f"a has Paceline 0.0.9, this is {paceline.__version__}"):
        check_hosts(hosts, print)


def test_a_host_without_paceline_is_named(hosts, way):
    way.here = f"cd /; unset PYTHONPATH; set -- {sys.executable} -S -m paceline.nowhere;"
    with pytest.raises(JobError, match="W006: a cannot run Paceline"):
        check_hosts(hosts, print)


def test_a_host_that_sees_another_folder_is_named(hosts, way, run):
    away = run.path.with_name("elsewhere")
    away.mkdir()
    way.here = f"sed --unbuffered 's#{run.path}#{away}#' |"
    with pytest.raises(JobError, match="W005: a does not see the run's folder"):
        check_hosts(hosts, print)


def test_a_clock_that_is_off_is_said(hosts, monkeypatch):
    said: list[str] = []
    now = time.time  # the hosts are other processes: only this one's is turned back
    monkeypatch.setattr("paceline.launch.node_commands.time.time", lambda: now() - 60)
    check_hosts(hosts, said.append)
    assert said[0] == "the clock of a is 60 s ahead of this machine's"


def inspection(seen: list[Gathered], *, calls: bool = False) -> Inspection:
    """Keeps what is to be judged, and finds that nobody has enough files."""

    def judge(gathered: Gathered, note: str | None) -> Iterator[Problem]:
        seen.append(gathered)
        for each in gathered.nodes:
            yield Problem(code="W032", what=f"{each.name} has few files", where="", fix="")

    return Inspection(question=Question(is_quick=True), calls=calls, judge=judge)


def test_hosts_are_judged_by_what_they_say_on_the_one_visit_that_each_gets(hosts, tmp_path, way):
    visits = tmp_path / "visits"
    way.here = f"echo visit >> '{visits}';"
    seen: list[Gathered] = []
    with pytest.raises(JobError, match="W032: b has few files"):
        check_hosts(hosts, print, inspection(seen))
    (gathered,) = seen
    assert all("nofile" in each.facts.limits for each in gathered.nodes if each.facts)
    assert visits.read_text().count("visit") == len(hosts.names)


def test_a_host_that_cannot_take_part_is_said_once_and_what_others_lack_beside_it(hosts, way):
    way.down.add("b")
    seen: list[Gathered] = []
    with pytest.raises(JobError) as refused:
        check_hosts(hosts, print, inspection(seen))
    said = [(each.code, each.what.split()[0]) for each in refused.value.problems]
    assert said == [("W004", "b"), ("W032", "a"), ("W032", "spare")]


def test_hosts_that_are_to_call_each_other_do(hosts):
    seen: list[Gathered] = []
    with pytest.raises(JobError):
        check_hosts(hosts, print, inspection(seen, calls=True))
    assert all(each.calls for each in seen[0].nodes)

"""Ask every node of a job what it has, at the same time, and keep what each says.

Whatever leads to a node at the job's place leads there now too, so that limits, environment and
containers are those that its ranks will have. Nothing stays behind on a node: what is started there
ends with this process, or when its time is over.

Leaves out the judgement (`check/preflight/`).
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from paceline.errors import JobError, Problem
from paceline.launch.hosts import MOST_AT_ONCE, Way
from paceline.launch.places import find_place
from paceline.plan import Plan
from paceline.render.example import script_text
from paceline.spec import Job
from paceline.topology.node.facts import (
    Gathered,
    Interface,
    NodeAnswer,
    NodeFacts,
    Peer,
    Question,
    Reached,
    SweepFacts,
    SweepPoint,
    TorchFacts,
)
from paceline.topology.node.interfaces import named_by_gloo, taken_by_nccl
from paceline.topology.node.messages import ANSWER, Call, Look, Seen, Start, Started
from paceline.topology.node.probe import probe_node

_T = TypeVar("_T")

LIMIT_S = 40.0
"""Of each round of questions: twice what a tool may take on a node, see `topology/probe.py`."""

_MEASURE_S = 120.0
"""Beside that for PyTorch to be imported and the sweep to run. A guess: 20 s on a slow disk."""

_SWEEP_BYTES = {"nccl": 256 * 2**20, "gloo": 16 * 2**20}
"""Largest size of the sweep: where NCCL on 8 GPUs is near its best, and gloo is past it."""

_SWEEP_FROM_BYTES = 4096
_MOST_ADDRESSES = 3
"""Of one node that are called: each costs seconds where nobody answers."""

_END_S = 30.0
"""That a listener stays beyond both rounds of questions: clients start one after the other."""

_MODULE = "paceline.topology.node"


@dataclass(frozen=True, slots=True)
class Here:
    """The way to this machine: none."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        return list(words)

    def is_unreached(self, returncode: int) -> bool:
        return False

    def python(self, module: str, *words: str) -> list[str]:
        return [sys.executable, "-m", module, *words]

    @property
    def patience_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a job, and how to get there."""

    place: str
    names: tuple[str, ...]
    way: Way
    minds_end: bool = True
    """Whether what is asked there sees the end of its input: Ray passes on one line only."""


def find_nodes(job: Job, plan: Plan, place: str) -> Nodes:
    """The nodes that a run at this place would have.

    Raises:
        JobError: The place is not ready, or cannot be asked before a job is there (`W031`).
    """
    find_place(place)  # a wrong name is answered with the nearest
    if place == "local":
        return Nodes(place=place, names=(socket.gethostname(),), way=Here())
    if place == "ssh":
        from paceline.launch import ssh
        from paceline.spec.hosts import find_hosts

        _raise_any(ssh.check(job, plan))
        names = tuple(host for host, _ in find_hosts(job))
        return Nodes(place=place, names=names, way=ssh.Ssh(job.spec.ssh, job.folder))
    if place in ("srun", "slurm"):
        from paceline.launch import srun

        if place == "slurm" and "SLURM_JOB_ID" not in os.environ:
            raise JobError(_no_nodes_yet(place, plan, "its nodes are not known before it runs"))
        _raise_any(srun.check(job, plan))
        way = srun.Srun(job.spec.slurm.python or sys.executable)
        return Nodes(place=place, names=tuple(srun.node_names()), way=way)
    if place == "ray":
        from paceline.launch import ray

        _raise_any(ray.check(job, plan))
        found = ray.find_nodes(job.spec.ray.address)
        through = ray.Through(0.0, 0.0, job.spec.ray.python or sys.executable, job.spec.ray.address)
        names = tuple(node.name for node in found)
        return Nodes(place=place, names=names, way=through, minds_end=False)
    raise JobError(_no_nodes_yet(place, plan, "its machines do not exist before the job does"))


def question_of(job: Job, runs: Path, *, is_quick: bool = False) -> Question:
    """What the nodes of this job are asked."""
    spec = job.spec
    asked = spec.data.path
    patterns = [] if asked is None else [asked] if isinstance(asked, str) else list(asked)
    folders = [str(runs.absolute())]
    if spec.layout.offload_path is not None:
        folders.append(str(job.folder / spec.layout.offload_path))
    code = []
    if spec.model.factory is not None:
        top = job.folder / spec.model.factory.partition(":")[0].partition(".")[0]
        code.append(str(top if top.is_dir() else top.with_suffix(".py")))
    port = spec.cluster.rendezvous_port
    return Question(
        folders=tuple(folders),
        data=() if is_quick else tuple(str(job.folder / pattern) for pattern in patterns),
        code=tuple(code),
        ports=() if port == "auto" else (port,),
        is_quick=is_quick,
    )


def look_here(question: Question) -> Gathered:
    """This machine alone, in this process: milliseconds where the question is quick."""
    began = time.monotonic()
    answer = NodeAnswer(name=socket.gethostname(), facts=probe_node(question))
    return Gathered(
        place="local",
        at=time.time(),
        nodes=(answer,),
        is_quick=question.is_quick,
        seconds=time.monotonic() - began,
    )


def gather(
    nodes: Nodes,
    question: Question,
    *,
    limit_s: float = LIMIT_S,
    on_note: Callable[[str], None] = lambda text: None,
) -> Gathered:
    """Look at every node, and let each call every other one. Measures nothing.

    Args:
        nodes: All are asked at the same time.
        question: The same for all.
        limit_s: After it a node that has not answered is given up.
        on_note: Told what is being waited for.
    """
    began = time.monotonic()
    visits = [_Visit(nodes, name, "look", _look(nodes, question, limit_s)) for name in nodes.names]
    answers: dict[str, NodeAnswer] = {}
    try:
        on_note(f"looking at {len(visits)} node(s)")
        seen = dict(zip(nodes.names, _all(visits, lambda v: v.ask(Seen, limit_s)), strict=True))
        for visit in visits:
            found = seen[visit.name]
            answers[visit.name] = (
                _answer_of(visit, found)
                if isinstance(found, Seen)
                else NodeAnswer(name=visit.name, why_not=found)
            )
        there = {name: each for name, each in seen.items() if isinstance(each, Seen)}
        if len(there) > 1:
            on_note("each node calls the others")
            words = {visit.name: visit.word for visit in visits}
            answers |= _let_call(nodes, answers, there, words, limit_s)
    finally:
        _all(visits, _Visit.end)
    return Gathered(
        place=nodes.place,
        at=time.time(),
        nodes=tuple(answers[name] for name in nodes.names),
        seconds=time.monotonic() - began,
    )


def measure(
    nodes: Nodes,
    gathered: Gathered,
    plan: Plan,
    *,
    limit_s: float = LIMIT_S,
    on_note: Callable[[str], None] = lambda text: None,
) -> Gathered:
    """The same with what PyTorch says on every node, and all-reduce over the job's ranks."""
    began = time.monotonic()
    on_note("importing PyTorch on every node, multiplying matrices")
    limit_s = limit_s + _MEASURE_S
    asked = Start(
        programs={},
        command=("-m", "paceline.runtime.device_check", "found.json"),
        environments=({},),
        limit_s=limit_s,
        minds_end=nodes.minds_end,
        answer="found.json",
    )
    there = [answer for answer in gathered.nodes if answer.facts is not None]
    told = _start_on(nodes, {answer.name: asked for answer in there}, limit_s)
    answers = tuple(_with_torch(answer, told.get(answer.name)) for answer in gathered.nodes)
    sweep = None
    chosen = [answer for answer in answers if answer.torch is not None]
    needed = 1 if nodes.place == "local" else plan.cluster.num_nodes
    if plan.cluster.num_ranks > 1 and len(chosen) >= needed:
        on_note(f"all-reduce over {plan.cluster.num_ranks} ranks")
        sweep = _sweep(nodes, chosen[:needed], plan, limit_s)
    return replace(
        gathered,
        nodes=answers,
        sweep=sweep,
        seconds=gathered.seconds + time.monotonic() - began,
    )


@contextlib.contextmanager
def left_note(question: Question) -> Iterator[tuple[Question, str | None]]:
    """A note in the run's folder while the nodes are asked: the question that names it, and its
    text; None where it cannot be left, which the folder's own check then says."""
    folder = Path(question.folders[0])
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    path = folder / f".paceline-preflight-note-{secrets.token_hex(8)}"
    text = secrets.token_hex(16)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        yield question, None
        return
    try:
        yield replace(question, note=path.name), text
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read_gathered(paths: Sequence[Path]) -> Gathered:
    """What was recorded (`paceline preflight --record`), of one file or of several put together.

    Raises:
        JobError: `T021`, a file cannot be read or is no recording.
    """
    found: list[Gathered] = []
    problems = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Gathered))
        except OSError as error:
            problems.append(_unreadable(path, error.strerror or str(error)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(_unreadable(path, f"it is no recording of a preflight: {error}"))
    if problems:
        raise JobError(*problems)
    return replace(
        found[0],
        nodes=tuple(node for each in found for node in each.nodes),
        sweep=next((each.sweep for each in found if each.sweep is not None), None),
        is_quick=any(each.is_quick for each in found),
    )


def write_gathered(gathered: Gathered, path: Path) -> None:
    """Keep it, to be judged again or elsewhere.

    Raises:
        JobError: `T014`, it cannot be written.
    """
    try:
        path.write_bytes(dump_gathered(gathered) + b"\n")
    except OSError as error:
        raise JobError(
            Problem(
                code="T014",
                what=f"{path} cannot be written: {error.strerror}",
                where="--record",
                fix="give a file in a folder that exists and that you may write to",
            )
        ) from None


def dump_gathered(gathered: Gathered) -> bytes:
    """The text of a recording."""
    return msgspec.json.format(msgspec.json.encode(gathered))


class _Visit:
    """One command on one node: a line in, a line out, and it may go on after that."""

    def __init__(self, nodes: Nodes, name: str, what: str, question: Look | Call | Start) -> None:
        self.name = name
        self.word = question.word if isinstance(question, Look) else ""
        self.is_here = nodes.place == "local"
        self.began_s = 0.0
        self.answered_s = 0.0
        self._nodes = nodes
        self._what = what
        self._line = msgspec.json.encode(question) + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: bytes | None = None
        self._is_given_up = False

    def ask(self, kind: type[_T], limit_s: float) -> _T | str:
        """Its answer, or why there is none."""
        way = self._nodes.way
        command = way.command(self.name, way.python(_MODULE, self._what))
        self.began_s = time.time()
        with tempfile.TemporaryFile() as said:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    start_new_session=True,
                )
            except OSError as error:
                return f"{command[0]} cannot be started: {error.strerror}"
            if self._is_given_up:  # while it was being started
                self._kill(self._process)
            self._tell(self._process)
            reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            reader.start()
            reader.join(limit_s)
            self.answered_s = time.time()
            if self._answer is None:
                return self._why(reader.is_alive(), said, limit_s)
        try:
            return msgspec.json.decode(self._answer, type=kind)
        except msgspec.DecodeError:
            return "it has another Paceline, whose answer is not understood"

    def end(self) -> None:
        """What was started there ends."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        if self._is_given_up:
            self._kill(process)
        try:
            process.wait(timeout=2.0 if self._nodes.minds_end else 0.0)
        except subprocess.TimeoutExpired:
            self._kill(process)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_given_up = True
        if self._process is not None:
            self._kill(self._process)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own, see `ask`

    def _tell(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            process.stdin.write(self._line)
            process.stdin.flush()
            if self._what == "call" or not self._nodes.minds_end:
                process.stdin.close()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed by `end`
            for line in process.stdout:
                if line.startswith(ANSWER.encode()):
                    self._answer = line.removeprefix(ANSWER.encode())
                    return

    def _why(self, is_silent: bool, said: IO[bytes], limit_s: float) -> str:
        if is_silent:
            return f"nothing was heard for {limit_s:.0f} s"
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip()[:300] if lines else f"exit code {self._process.returncode}"
        if "No module named" in last and "paceline" in last:
            return f"Paceline is not installed there: {last}"
        return last


def _all(visits: Sequence[_Visit], act: Callable[[_Visit], _T]) -> list[_T]:
    """What each comes to, in order. Ctrl-C gives all of them up at once."""
    pool = ThreadPoolExecutor(max(1, min(len(visits), 4 * MOST_AT_ONCE)))
    try:
        return list(pool.map(act, visits))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for visit in visits:
            visit.give_up()
        raise
    finally:
        pool.shutdown(wait=True)


def _look(nodes: Nodes, question: Question, limit_s: float) -> Look:
    return Look(
        question=question,
        word=secrets.token_hex(16),
        # Its own end, should nobody be left to end it: two rounds of questions.
        stays_s=2 * limit_s + _END_S,
        minds_end=nodes.minds_end,
    )


def _answer_of(visit: _Visit, seen: Seen) -> NodeAnswer:
    facts = seen.facts
    way_s = max(0.0, visit.answered_s - visit.began_s - facts.seconds)
    return NodeAnswer(
        name=visit.name,
        facts=facts,
        # It looks at its clock last; what the answer's way took from there is a part of `way_s`.
        ahead_s=None if visit.is_here else facts.unix_s - visit.answered_s,
        ahead_within_s=None if visit.is_here else way_s,
    )


def _let_call(
    nodes: Nodes,
    answers: Mapping[str, NodeAnswer],
    seen: Mapping[str, Seen],
    words: Mapping[str, str],
    limit_s: float,
) -> dict[str, NodeAnswer]:
    peers = {
        name: Peer(
            name=name,
            addresses=tuple(addresses_of(each.facts)[:_MOST_ADDRESSES]),
            port=each.port,
            word=words[name],
        )
        for name, each in seen.items()
    }
    calls = [
        _Visit(
            nodes,
            name,
            "call",
            Call(
                peers=tuple(peer for other, peer in peers.items() if other != name),
                source=_source(each.facts),
            ),
        )
        for name, each in seen.items()
    ]
    try:
        heard = _all(calls, lambda visit: visit.ask(tuple[Reached, ...], limit_s))
    finally:
        _all(calls, _Visit.end)
    return {
        visit.name: replace(answers[visit.name], calls_why_not=found)
        if isinstance(found, str)
        else replace(answers[visit.name], calls=found)
        for visit, found in zip(calls, heard, strict=True)
    }


def addresses_of(facts: NodeFacts) -> list[str]:
    """IPv4 addresses under which others are to reach a node, what its libraries take first."""
    named = _named(facts)
    taken = named if named is not None else taken_by_nccl(None, facts.interfaces)
    others = [] if named is not None else list(facts.interfaces)
    found = [
        address
        for interface in [*taken, *others]
        if interface.is_up and not interface.is_loopback
        for address in interface.addresses
        if ":" not in address
    ]
    return list(dict.fromkeys(found))


def _source(facts: NodeFacts) -> str | None:
    """The address to call from where a variable names an interface; None is any."""
    if _named(facts) is None:
        return None
    return next(iter(addresses_of(facts)), None)


def _named(facts: NodeFacts) -> Sequence[Interface] | None:
    """The interfaces that variables name; None where none does, or only wrong ones are named."""
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME")
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME")
    named = taken_by_nccl(nccl, facts.interfaces) if nccl else []
    named = named or (named_by_gloo(gloo, facts.interfaces) if gloo else [])
    outward = [each for each in named if not each.is_loopback]
    return outward or None


def _start_on(nodes: Nodes, asked: Mapping[str, Start], limit_s: float) -> dict[str, Started | str]:
    visits = [_Visit(nodes, name, "start", each) for name, each in asked.items()]
    try:
        limit = limit_s + nodes.way.patience_s + 5.0
        heard = _all(visits, lambda visit: visit.ask(Started, limit))
    finally:
        _all(visits, _Visit.end)
    return {visit.name: found for visit, found in zip(visits, heard, strict=True)}


def _with_torch(answer: NodeAnswer, told: Started | str | None) -> NodeAnswer:
    if told is None:
        return answer
    if isinstance(told, str):
        return replace(answer, torch_why_not=told)
    if told.why_not is not None:
        return replace(answer, torch_why_not=told.why_not)
    try:
        return replace(answer, torch=msgspec.json.decode(told.text, type=TorchFacts))
    except msgspec.DecodeError:
        return replace(answer, torch_why_not="its answer is not understood")


def _sweep(nodes: Nodes, answers: Sequence[NodeAnswer], plan: Plan, limit_s: float) -> SweepFacts:
    cluster = plan.cluster
    is_here = nodes.place == "local"
    world = cluster.num_ranks
    per_node = world if is_here else cluster.ranks_per_node
    first = answers[0].facts
    assert first is not None
    address = "127.0.0.1" if is_here else next(iter(addresses_of(first)), "127.0.0.1")
    port = 20_000 + secrets.randbelow(10_000)  # below what the kernel hands out by itself
    size = _SWEEP_BYTES.get(cluster.backend, _SWEEP_BYTES["gloo"])
    asked = {
        answer.name: Start(
            programs={"all_reduce.py": script_text("all_reduce.py")},
            command=(
                *("all_reduce.py", "--min-bytes", str(_SWEEP_FROM_BYTES)),
                *("--max-bytes", str(size), "--json", "found.json"),
            ),
            environments=[
                _environment(answer, node * per_node + local, local, world, address, port)
                for local in range(per_node)
            ],
            limit_s=limit_s,
            minds_end=nodes.minds_end,
            answer="found.json" if node == 0 else "",
        )
        for node, answer in enumerate(answers)
    }
    told = _start_on(nodes, asked, limit_s)
    failing = {
        name: each if isinstance(each, str) else each.why_not
        for name, each in told.items()
        if isinstance(each, str) or each.why_not is not None
    }
    backend = cluster.backend
    if failing:
        # Of several that end, the one with words of its own: the others say that a peer has gone.
        name, why = min(failing.items(), key=lambda item: "closed by peer" in (item[1] or ""))
        return SweepFacts(world_size=world, backend=backend, why_not=why, node=name)
    text = told[answers[0].name]
    assert isinstance(text, Started)
    found = json.loads(text.text)
    return SweepFacts(
        world_size=world,
        backend=backend,
        points=tuple(
            SweepPoint(
                bytes=row["bytes"],
                seconds=row["seconds"],
                busbw_bytes_per_s=row["busbw_bytes_per_s"],
            )
            for row in found["rows"]
        ),
    )


def _environment(
    answer: NodeAnswer, rank: int, local: int, world: int, address: str, port: int
) -> dict[str, str]:
    """As an agent would set it: what the node itself has set stays."""
    facts = answer.facts
    assert facts is not None
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": facts.environment.get("OMP_NUM_THREADS", "1"),
    }
    if "GLOO_SOCKET_IFNAME" not in facts.environment:
        loopback = next((each.name for each in facts.interfaces if each.is_loopback), "lo")
        outward = [
            each.name
            for each in facts.interfaces
            if set(each.addresses) & set(addresses_of(facts)[:1])
        ]
        is_here = address == "127.0.0.1"
        environment["GLOO_SOCKET_IFNAME"] = loopback if is_here or not outward else outward[0]
    return environment


def _raise_any(problems: Iterator[Problem]) -> None:
    found = list(problems)
    if found:
        raise JobError(*found)


def _no_nodes_yet(place: str, plan: Plan, why: str) -> Problem:
    fixes = {
        "slurm": f"salloc --no-kill --nodes={plan.cluster.num_nodes}, and in it paceline preflight "
        "JOB --on srun; or put that line into slurm.setup, for the job to look before it trains",
        "kubernetes": "kubectl exec POD -- paceline preflight JOB --record - > pod.json "
        "in every pod, and then: paceline preflight JOB --from pod.json ...",
    }
    return Problem(
        code="W031",
        what=f"{place} cannot be looked at before the job is there: {why}",
        where="--on",
        fix=fixes.get(place, "log in to each machine, and paceline preflight JOB --record FILE"),
    )


def _unreadable(path: Path, why: str) -> Problem:
    return Problem(
        code="T021",
        what=f"{path} cannot be read: {why}",
        where="--from",
        fix="give files that `paceline preflight JOB --record FILE` wrote",
    )

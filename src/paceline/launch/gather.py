"""Look at every node of a job at the same time, and keep what each says.

Leaves out the way there (`node_commands.py`), what is measured (`measure.py`) and the judgement
(`check/preflight/`).
"""

import contextlib
import glob
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.job import Job
from paceline.job.hf_config import has_hf_config
from paceline.launch.node_commands import Nodes, Silence, Visit, ask_all, ask_each
from paceline.topology.node.facts import (
    Gathered,
    Interface,
    NodeAnswer,
    NodeFacts,
    Peer,
    Question,
    Reached,
)
from paceline.topology.node.interfaces import named_by_gloo, taken_by_nccl
from paceline.topology.node.messages import Call, Look, Seen
from paceline.topology.node.probe import probe_node
from paceline.units import counted

LIMIT_S = 40.0
"""Seconds of each round of questions: twice what a tool may take on a node, see
`topology/probe.py`."""

_MOST_ADDRESSES = 3
"""Addresses of one node that are called: each costs seconds where nobody answers."""

_END_S = 30.0
"""Seconds that a listener stays beyond both rounds of questions: clients start one after the
other."""


def question_of(job: Job, runs: Path, *, is_quick: bool = False) -> Question:
    """What the nodes of this job are asked."""
    spec = job.spec
    asked = spec.data.path
    patterns = [] if asked is None else [asked] if isinstance(asked, str) else list(asked)
    # Weights and tokenizer in files of one's own; those of the Hugging Face cache have another path
    # on each machine.
    own = [each for each in (spec.model.pretrained, spec.model.tokenizer) if each is not None]
    patterns += [each for each in own if (job.folder / os.path.expanduser(each)).exists()]
    folders = [str(runs.absolute())]
    if spec.layout.offload_path is not None:
        folders.append(str(job.folder / spec.layout.offload_path))
    code = {}
    if spec.model.factory is not None or spec.program is not None:
        code["job folder"] = str(job.folder)  # the program and whatever it imports there
    if spec.model.hf_config is not None and has_hf_config(job):
        config = job.folder / spec.model.hf_config
        code["config.json"] = str(config / "config.json" if config.is_dir() else config)
    port = spec.cluster.rendezvous_port
    return Question(
        folders=tuple(folders),
        data=tuple(_pattern(job.folder / os.path.expanduser(each)) for each in patterns),
        code=code,
        ports=() if port == "auto" else (port,),
        is_quick=is_quick,
    )


def _pattern(path: Path) -> str:
    if path.is_dir():
        return str(Path(glob.escape(str(path))) / "**")
    return glob.escape(str(path)) if path.is_file() else str(path)


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
    calls: bool = True,
    on_note: Callable[[str], None] = lambda text: None,
) -> Gathered:
    """Look at every node, and let each call every other one. Measures nothing.

    Args:
        calls: Whether they call each other, which costs a second round of questions.
    """
    began = time.monotonic()
    # Its own end, should nobody be left to end it: two rounds of questions.
    stays_s = 2 * limit_s + _END_S if calls and len(nodes.names) > 1 else 0.0
    visits = [Visit(nodes, name, "look", _look(nodes, question, stays_s)) for name in nodes.names]
    answers: dict[str, NodeAnswer] = {}
    try:
        on_note(f"looking at {counted(len(visits), 'node')}")
        seen = dict(zip(nodes.names, ask_all(visits, lambda v: v.ask(Seen, limit_s)), strict=True))
        answers = {visit.name: _answer_of(visit, seen[visit.name]) for visit in visits}
        there = {name: each for name, each in seen.items() if isinstance(each, Seen)}
        if calls and len(there) > 1:
            on_note("each node calls the others")
            words = {visit.name: visit.word for visit in visits}
            answers |= _let_call(nodes, answers, there, words, limit_s)
    finally:
        ask_all(visits, Visit.end)
    return Gathered(
        place=nodes.place,
        at=time.time(),
        nodes=tuple(answers[name] for name in nodes.names),
        is_quick=question.is_quick,
        seconds=time.monotonic() - began,
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


def _look(nodes: Nodes, question: Question, stays_s: float) -> Look:
    return Look(
        question=question,
        word=secrets.token_hex(16),
        stays_s=stays_s,
        minds_end=nodes.way.minds_end,
    )


def _answer_of(visit: Visit, seen: Seen | Silence) -> NodeAnswer:
    if isinstance(seen, Silence):
        return NodeAnswer(name=visit.name, why_not=seen.why, is_unreached=seen.is_unreached)
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
        Visit(
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
    return {
        name: replace(answers[name], calls_why_not=found.why)
        if isinstance(found, Silence)
        else replace(answers[name], calls=found)
        for name, found in ask_each(calls, tuple[Reached, ...], limit_s).items()
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

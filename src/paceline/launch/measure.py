"""What PyTorch says on every node of a job, and all-reduce over its ranks.

Leaves out the look before it (`gather.py`) and the judgement (`check/preflight/bandwidth.py`).
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from paceline.launch.gather import LIMIT_S, addresses_of
from paceline.launch.node_commands import Nodes, Silence, Visit, ask_each
from paceline.plan import Plan
from paceline.render.example import script_text
from paceline.topology.node.facts import (
    Gathered,
    NodeAnswer,
    SweepFacts,
    SweepPoint,
    TorchFacts,
)
from paceline.topology.node.messages import Start, Started
from paceline.units import counted

_MEASURE_S = 120.0
"""Beside a round's limit, for PyTorch to be imported and the sweep to run. A guess: 20 s on a slow
disk."""

_SWEEP_BYTES = {"nccl": 256 * 2**20, "gloo": 16 * 2**20}
"""Largest size of the sweep: where NCCL on 8 GPUs is near its best, and gloo is past it."""

_SWEEP_FROM_BYTES = 4096


def measure(
    nodes: Nodes,
    gathered: Gathered,
    plan: Plan,
    *,
    limit_s: float = LIMIT_S,
    on_note: Callable[[str], None] = lambda text: None,
) -> Gathered:
    """What was gathered, with what PyTorch says on every node, and all-reduce over the job's
    ranks."""
    began = time.monotonic()
    on_note("importing PyTorch on every node, multiplying matrices")
    answers = ask_torch(nodes, gathered, limit_s=limit_s)
    limit_s = limit_s + _MEASURE_S
    sweep = None
    chosen = [answer for answer in answers if answer.torch is not None]
    needed = 1 if nodes.place == "local" else plan.cluster.num_nodes
    if plan.cluster.num_ranks > 1 and len(chosen) >= needed:
        on_note(f"all-reduce over {counted(plan.cluster.num_ranks, 'rank')}")
        sweep = _sweep(nodes, chosen[:needed], plan, limit_s)
    return replace(
        gathered,
        nodes=answers,
        sweep=sweep,
        seconds=gathered.seconds + time.monotonic() - began,
    )


def ask_torch(
    nodes: Nodes, gathered: Gathered, *, limit_s: float = LIMIT_S
) -> tuple[NodeAnswer, ...]:
    """The nodes' answers with what a process says that imports PyTorch and multiplies matrices."""
    asked = Start(
        programs={},
        command=("-m", "paceline.runtime.device_check", "found.json"),
        environments=({},),
        limit_s=limit_s + _MEASURE_S,
        minds_end=nodes.way.minds_end,
        answer="found.json",
    )
    there = [answer for answer in gathered.nodes if answer.facts is not None]
    told = _start_on(nodes, {answer.name: asked for answer in there}, limit_s + _MEASURE_S)
    return tuple(_with_torch(answer, told.get(answer.name)) for answer in gathered.nodes)


def _start_on(
    nodes: Nodes, asked: Mapping[str, Start], limit_s: float
) -> dict[str, Started | Silence]:
    visits = [Visit(nodes, name, "start", each) for name, each in asked.items()]
    return ask_each(visits, Started, limit_s + nodes.way.patience_s + 5.0)


def _with_torch(answer: NodeAnswer, told: Started | Silence | None) -> NodeAnswer:
    if told is None:
        return answer
    if isinstance(told, Silence):
        return replace(answer, torch_why_not=told.why)
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
            minds_end=nodes.way.minds_end,
            answer="found.json" if node == 0 else "",
        )
        for node, answer in enumerate(answers)
    }
    told = _start_on(nodes, asked, limit_s)
    failing = {
        name: each.why if isinstance(each, Silence) else each.why_not
        for name, each in told.items()
        if isinstance(each, Silence) or each.why_not is not None
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

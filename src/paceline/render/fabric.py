"""RDMA or TCP between the nodes of a plan: what each costs in its own messages, and how to see in
NCCL's log which one a run really uses.

The step is priced again with the other network's rate and latency, by the same estimate that chose
the layout: what a step sends, and how much of it hides behind compute, is the plan's own.

Leaves out: TCP over the RDMA NICs themselves (IPoIB), whose rate nobody publishes: measure it.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.catalog.load import load_links
from paceline.estimate.estimate import Estimate, price_one
from paceline.plan.case import case_of_plan
from paceline.plan.decision import Plan
from paceline.render.environment import Variable
from paceline.topology import Cluster
from paceline.units import format_bytes, format_seconds, significant

NOTICED = 1.05
"""A step slower than this is called so; below, the estimate's own error is larger. A convention."""

_TCP = ("ethernet-100", "ethernet-25", "ethernet-10")
_RDMA = ("infiniband-ndr", "infiniband-hdr", "roce-100")
_MACS = {True: ("thunderbolt-5-tcp", "ethernet-10"), False: ("thunderbolt-5-jaccl",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What ranks of different nodes send each other in one step, largest first."""

    what: str
    num_bytes: int
    """Bytes of one collective or transfer, before it is cut into chunks."""

    times: int
    """In one optimizer step, on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """The plan's step over another network."""

    link: str
    """Row of the catalog's links: one port of it in each node."""

    bytes_per_s: float
    """Network rate of a node and direction."""

    step_s: float
    times_as_long: float
    """The step, against the plan's own network: below 1 is faster."""

    slower_s: dict[str, float]
    """Term of the estimate -> seconds that it grows by; those that do not change are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a plan's nodes talk over, and what that is worth."""

    choice: Literal["rdma", "tcp", "none"]
    """`none` where no rank talks to another node."""

    link: str | None
    bytes_per_s: float | None
    """Network rate of a node and direction."""

    reason: str
    """In the plan's own numbers."""

    messages: tuple[Message, ...]
    others: tuple[Other, ...]
    """RDMA against TCP of usual rates, or TCP against RDMA; empty where no time is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of NCCL's log (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET) and what it means."""

    pattern: str
    """Extended regular expression for grep."""

    wanted: Literal["yes", "no", "better", "worse"]
    """`better`: right without it, and faster with it; `worse`: right with it, and slower."""

    meaning: str


def decide_network(plan: Plan) -> Network:
    """RDMA or TCP, and the difference it makes to the plan's step (estimated)."""
    link, rate = plan.cluster.network_link, plan.cluster.network_bytes_per_s
    if plan.cluster.num_nodes == 1 or link is None:
        return Network(
            choice="none",
            link=None,
            bytes_per_s=None,
            reason="no rank talks to another node: one node, or one fast link joins them all",
            messages=(),
            others=(),
        )
    others = _others(plan)
    return Network(
        choice="rdma" if plan.cluster.uses_rdma else "tcp",
        link=link,
        bytes_per_s=rate,
        reason=_reason(plan, others),
        messages=messages(plan),
        others=others,
    )


def messages(plan: Plan) -> tuple[Message, ...]:
    """Sizes in float32 for gradients and in the precision for what is gathered; an upper bound,
    as embeddings count to every stage."""
    layout, profile = plan.layout, plan.profile
    part = profile.num_trained_parameters / (layout.tensor * layout.pipeline)
    blocks = max(1, round(profile.num_blocks / layout.pipeline))
    narrow = 4 if plan.precision in ("fp32", "tf32") else 2
    found: list[Message] = []
    if layout.data * layout.context > 1:
        if layout.sharding in ("full", "hybrid"):
            times = layout.accumulation
            whole = round(narrow * part / blocks)
            found.append(
                Message(
                    what="parameters of a block, gathered",
                    num_bytes=whole,
                    times=2 * blocks * times,
                )
            )
            reduced = times if layout.reduce_every_micro_batch else 1
            found.append(
                Message(
                    what="gradients of a block, scattered",
                    num_bytes=round(4 * part / blocks),
                    times=blocks * reduced,
                )
            )
        else:
            found.append(Message(what="gradients, all of them", num_bytes=round(4 * part), times=1))
    if layout.pipeline > 1 and profile.seq_len:
        tokens = layout.micro_batch * profile.seq_len / layout.context
        size = round(narrow * tokens * profile.head_inputs)
        times = 2 * layout.accumulation * layout.chunks
        found.append(Message(what="activations between stages, sent", num_bytes=size, times=times))
    return tuple(sorted(found, key=lambda each: -each.num_bytes))


def log_lines(plan: Plan) -> tuple[LogLine, ...]:
    """What NCCL's log of a run must say, and must not; nothing where NCCL is not used.

    Source: NCCL's src/init.cc, src/transport/net.cc and net_ib (2.2x); aws-ofi-nccl.
    """
    if plan.cluster.backend != "nccl" or plan.cluster.network_link is None:
        return ()
    if not plan.cluster.uses_rdma:
        return (
            LogLine(
                pattern="Using network [A-Za-z]",
                wanted="yes",
                meaning="NCCL chose a network; `Socket` is TCP",
            ),
        )
    name = _transport(plan)
    return (
        LogLine(
            pattern=f"Using network ({name})",
            wanted="yes",
            meaning="every rank found the RDMA ports. Without it: is /dev/infiniband in the "
            "container, may it lock memory (ulimit -l unlimited), is NCCL_IB_DISABLE set?",
        ),
        LogLine(
            pattern="Using network Socket|via NET/Socket",
            wanted="no",
            meaning="some ranks talk over TCP, and all wait for them",
        ),
        LogLine(
            pattern=f"via NET/({name})",
            wanted="yes",
            meaning="channels between nodes. Without it no rank has sent to another node yet",
        ),
        LogLine(
            pattern=f"via NET/({name})[^ ]*/GDRDMA",
            wanted="better",
            meaning="the NIC reads the GPU's memory (GPUDirect RDMA). Without it every byte goes "
            "through the host: load nvidia_peermem or use a driver with dma-buf, and put NIC and "
            "GPU on one PCIe switch",
        ),
        LogLine(
            pattern="GPU Direct RDMA Disabled for",
            wanted="worse",
            meaning="a NIC that cannot read the GPU's memory; no harm where it is for storage",
        ),
    )


def site_settings(plan: Plan) -> list[Variable]:
    """NCCL's settings that only the machine's owner can know, with an example value; the reason
    says when. Everything else NCCL finds out."""
    if plan.cluster.backend != "nccl" or plan.cluster.network_link is None:
        return []
    found = [
        Variable(
            name="NCCL_SOCKET_IFNAME",
            value="=eth0",
            reason="only where `NET/Socket : Using` in the log names an interface that other nodes "
            "cannot reach; = is exactly this one",
        )
    ]
    if not plan.cluster.uses_rdma or _transport(plan) != "IB":
        return found
    found.append(
        Variable(
            name="NCCL_IB_HCA",
            value="=mlx5_0,mlx5_1",
            reason="only where some ports are for storage; without = mlx5_1 is mlx5_10 as well",
        )
    )
    if (plan.cluster.network_link or "").startswith("roce"):
        found.append(
            Variable(
                name="NCCL_IB_GID_INDEX",
                value="3",
                reason="only before NCCL 2.21, which finds RoCE v2 itself; show_gids has the index",
            )
        )
    return found


def over_tcp(plan: Plan) -> str:
    """What TCP makes of a step that was priced with RDMA, by usual rates; empty where unknown."""
    times = sorted(each.times_as_long for each in _others(plan))
    if not times or plan.estimate.step_s is None:
        return ""
    ends = " to ".join(f"{significant(each, 2)}" for each in dict.fromkeys((times[0], times[-1])))
    return (
        f": the planned {format_seconds(plan.estimate.step_s)} a step become {ends} times as long "
        "(estimated)"
    )


def _transport(plan: Plan) -> str:
    """What NCCL calls it: its own verbs (IB, or IBext of a plug-in), or libfabric's plug-in."""
    link = plan.cluster.network_link or ""
    return "AWS Libfabric|Libfabric|OFI" if link.startswith(("efa", "slingshot")) else "IB"


def _others(plan: Plan) -> tuple[Other, ...]:
    own_rate = plan.cluster.network_bytes_per_s
    if own_rate is None or plan.cluster.network_link is None or plan.cluster.backend == "gloo":
        return ()  # gloo's ranks are priced as of one node
    has_rdma = plan.cluster.uses_rdma
    base = _priced(plan, plan.cluster)
    names = _MACS[has_rdma] if plan.cluster.backend == "mlx" else (_TCP if has_rdma else _RDMA)
    found = []
    for name in names:
        other = load_links()[name]
        if base is None or base.step_s is None or (has_rdma and other.bytes_per_s > own_rate):
            continue
        step = _priced(plan, plan.cluster.over_network(other))
        if step is None or step.step_s is None:
            continue
        slower = {
            term: step.terms[term] - base.terms[term]
            for term in step.terms
            if abs(step.terms[term] - base.terms[term]) > 1e-9
        }
        found.append(
            Other(
                link=name,
                bytes_per_s=other.bytes_per_s,
                step_s=step.step_s,
                times_as_long=step.step_s / base.step_s,
                slower_s=slower,
            )
        )
    return tuple(found)


def _priced(plan: Plan, cluster: Cluster) -> Estimate | None:
    """The plan's layout on a cluster with another network; None where rates are unknown."""
    case = case_of_plan(plan, cluster)
    return None if case.rates is None else price_one(plan.layout, case)


def _reason(plan: Plan, others: tuple[Other, ...]) -> str:
    has_rdma = plan.cluster.uses_rdma
    step_s, rate = plan.estimate.step_s, plan.cluster.network_bytes_per_s
    if not others or step_s is None or rate is None:
        return (
            "gloo sends over TCP"
            if plan.cluster.backend == "gloo"
            else f"{plan.cluster.network_link}; what another network would cost is unknown"
        )
    link = plan.cluster.network_link
    own = f"{link}, {8e-9 * rate:.4g} Gb/s a node, {format_seconds(step_s)} a step"
    said = ", ".join(
        f"{each.link} {significant(each.times_as_long, 2)} times as long" for each in others
    )
    sent = messages(plan)
    size = f"; the most it sends at once is {format_bytes(sent[0].num_bytes)}" if sent else ""
    if has_rdma:
        worst, best = max(o.times_as_long for o in others), min(o.times_as_long for o in others)
        judged = (
            "RDMA pays"
            if best >= NOTICED
            else "TCP of the faster kinds costs less than is noticed"
            if worst >= NOTICED
            else "TCP would cost less than is noticed"
        )
        return f"{judged}: {own}; over TCP, by one port a node: {said}{size} (estimated)"
    gain = min(each.times_as_long for each in others)
    judged = "RDMA would pay" if gain <= 1 / NOTICED else "RDMA would gain less than is noticed"
    return f"{judged}: {own} over TCP; with RDMA: {said}{size} (estimated)"

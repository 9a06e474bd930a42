"""Between nodes: names, calls, packets, ports."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, unknown, warned
from paceline.topology.node.facts import Interface, NodeAnswer, NodeFacts
from paceline.topology.node.interfaces import named_by_gloo, taken_by_nccl

_NAMING = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
"""Variables that say which interface is taken."""


def check_network(answer: NodeAnswer, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What one node says of the others, of its own name and its ports."""
    node = answer.name
    yield from _ports(node, facts)
    if not need.is_apart:
        return
    yield from check_own_name(node, facts, need)
    if answer.calls is None:
        why = answer.calls_why_not or "nobody was called"
        yield unknown("reach", node, why)
        return
    if need.has_host_names:
        yield _names(answer)
    yield _reach(answer)


def _ports(node: str, facts: NodeFacts) -> Iterator[Result]:
    for port, why in facts.ports.items():
        if why:
            said = f"port {port}: {why}"
            fix = (
                f"ss -ltnp 'sport = :{port}' names who has it; or leave cluster.rendezvous_port out"
            )
            yield failed("ports", node, said, id="port-in-use", fix=fix)
        else:
            yield passed("ports", node, f"port {port} is free")


def check_own_name(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Gloo listens where the host's own name leads, unless a variable names an interface."""
    name, own = "own-name", facts.own_addresses
    if own is None:
        return
    addresses = ", ".join(own) or "nowhere"
    said = f"the host name {facts.host} resolves to {addresses}"
    named = facts.environment.get("GLOO_SOCKET_IFNAME")
    looped = [each for each in own if each.startswith("127.") or each == "::1"]
    fix = (
        f"give {facts.host} its own address in /etc/hosts, or export GLOO_SOCKET_IFNAME="
        f"{_first_name(facts.interfaces)}"
    )
    if need.has_agents and not named:
        yield passed(name, node, f"{said}; agents tell gloo which interface to take")
    elif not own and not named:
        yield warned(name, node, said, id="dns-unresolvable-master", fix=fix)
    elif looped and len(looped) == len(own) and not named:
        yield warned(name, node, said, id="gloo-loopback-fullmesh", fix=fix)
    else:
        yield passed(name, node, said + (f"; GLOO_SOCKET_IFNAME={named}" if named else ""))


def _names(answer: NodeAnswer) -> Result:
    calls = answer.calls or ()
    lost = [call.peer for call in calls if not call.resolved]
    looped = [
        call.peer
        for call in calls
        if call.resolved and all(each.startswith("127.") or each == "::1" for each in call.resolved)
    ]
    fix = "add the nodes to DNS or to /etc/hosts of every node"
    if lost:
        others = "the other node" if len(calls) == 1 else f"any of the {len(calls)} others"
        said = f"does not resolve {others if len(lost) == len(calls) else _some(lost)}"
        return warned("names", answer.name, said, id="dns-unresolvable-master", fix=fix)
    if looped:
        said = f"takes {_some(looped)} for itself: a loopback address"
        return failed("names", answer.name, said, id="gloo-loopback-fullmesh", fix=fix)
    return passed("names", answer.name, f"resolves all {len(calls)} others")


def _reach(answer: NodeAnswer) -> Result:
    calls = answer.calls or ()
    name, node = "reach", answer.name
    failing = [call for call in calls if call.why_not is not None]
    truncated = [call for call in failing if "MTU" in (call.why_not or "")]
    if truncated:
        said = f"{_some([call.peer for call in truncated])}: {truncated[0].why_not}"
        fix = "ping -M do -s 8972 HOST; one MTU on NICs, bonds, bridges and switches alike"
        return failed(name, node, said, id="mtu-mismatch", fix=fix)
    if failing:
        said = f"does not reach {_some([call.peer for call in failing])}: {failing[0].why_not}"
        fix = (
            "open all TCP ports between the nodes (security group, firewalld, NetworkPolicy), or "
            "name the interface that leads there: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        )
        refused = failed(name, node, said, id="nccl-connect-refused", fix=fix)
        return replace(refused, unreached=tuple(call.peer for call in failing))
    astray = [call for call in calls if call.unreached]
    if astray:
        first = astray[0]
        said = (
            f"{first.peer} answers at {first.address}, and not at {first.unreached[0]}, which its "
            "libraries take first"
        )
        fix = "name the interface that leads there: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        return warned(name, node, said, id="nccl-wrong-interface", fix=fix)
    slowest = max((call.seconds or 0.0 for call in calls), default=0.0)
    others = f"all {len(calls)} others" if len(calls) > 1 else "the other node"
    return passed(name, node, f"reaches {others}, {slowest * 1e3:.1f} ms at most")


def check_alike(nodes: Mapping[str, NodeFacts], need: Need) -> Iterator[Result]:
    """The interface that the job talks over has the same MTU everywhere."""
    if not need.is_apart or len(nodes) < 2:
        return
    used = {node: used_interface(facts) for node, facts in nodes.items()}
    counts = Counter(each.mtu for each in used.values() if each is not None)
    if not counts:
        return
    usual = counts.most_common(1)[0][0]
    for node, interface in used.items():
        if interface is None and nodes[node].environment.keys() & _NAMING:
            continue  # what names a wrong one is said by itself
        if interface is None:
            fix = "ip -br address; bring the interface up and give it an address"
            said = "no interface but the loopback is up"
            yield failed("mtu", node, said, id="nccl-wrong-interface", fix=fix)
        elif interface.mtu != usual:
            said = f"{interface.name} has MTU {interface.mtu}, most nodes {usual}"
            fix = f"ip link set {interface.name} mtu {usual}"
            yield warned("mtu", node, said, id="mtu-mismatch", fix=fix)
        else:
            yield passed("mtu", node, f"{interface.name}: {interface.mtu}, as on the others")


def used_interface(facts: NodeFacts) -> Interface | None:
    """The interface that the libraries take first; None where only the loopback is up."""
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME")
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME")
    named = named_by_gloo(gloo, facts.interfaces) if gloo and not nccl else []
    taken = named or taken_by_nccl(nccl, facts.interfaces)
    outward = [each for each in taken if not each.is_loopback and each.addresses]
    return outward[0] if outward else None


def _first_name(interfaces: Sequence[Interface]) -> str:
    taken = [each.name for each in taken_by_nccl(None, interfaces) if not each.is_loopback]
    return taken[0] if taken else "eth0"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

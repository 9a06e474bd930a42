"""What NCCL_DEBUG=INFO says of the network: which was chosen, how GPUs reach each other."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.catalog.nccl import UNWANTED, wrong_value
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.seen import Found
from paceline.units import counted

_VIRTUAL = re.compile(r"^(lo|docker|br-|virbr|veth|cni|flannel|cali|tun|tap|kube|podman|wg)")
"""Interfaces that lead to no other machine: loopback, bridges and tunnels of containers."""


@dataclass(slots=True)
class Network:
    """What was seen of NCCL's choices."""

    version: str | None = None
    driver: str | None = None
    networks: Counter[str] = field(default_factory=Counter)
    devices: set[str] = field(default_factory=set)
    interfaces: set[str] = field(default_factory=set)
    transports: Counter[str] = field(default_factory=Counter)
    gdr_channels: int = 0
    gdr_off: set[str] = field(default_factory=set)
    channels: int | None = None
    nvls: bool | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """`nRanks`, `nNodes` and `localRanks`, the highest that was said."""

    settings: dict[str, str] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    first: Line | None = None
    named: Line | None = None
    """The first line that names an interface."""

    forbids: Line | None = None
    """The line that says that RDMA may not be used."""

    @property
    def is_several_nodes(self) -> bool | None:
        """Whether the job has more than one node; None where nothing says it.

        One host's name says nothing: it may be one node's log of many.
        """
        if "nNodes" in self.counts:
            return self.counts["nNodes"] > 1
        if len(self.hosts) > 1:
            return True
        num_ranks = self.counts.get("nRanks", 0)
        if num_ranks and self.counts.get("localRanks"):
            return num_ranks > self.counts["localRanks"]
        return False if num_ranks == 1 else None

    @property
    def is_between_nodes(self) -> bool:
        """Whether there is more than one node, as said, or as connections over a network show."""
        said = self.is_several_nodes
        return bool(self.transports.get("NET")) if said is None else said

    @property
    def uses_sockets(self) -> bool:
        """Whether the network between nodes is TCP."""
        return bool(self.networks) and set(self.networks) == {"Socket"}


def read_network(lines: Sequence[Line]) -> Network | None:
    """What NCCL's lines say; None where there are none."""
    seen = Network()
    for line in lines:
        text = line.message
        if "NCCL INFO" in text and line.host:
            seen.hosts.add(line.host)
        _read(seen, line, text)
    return seen if seen.version or seen.networks or seen.transports else None


def _read(seen: Network, line: Line, text: str) -> None:
    if match := re.search(r"NCCL version (\d\S*)", text):
        seen.version = match[1]
    if match := re.search(r"cudaDriverVersion (\d+)", text):
        number = int(match[1])
        seen.driver = f"CUDA driver {number // 1000}.{number % 1000 // 10}"
    if match := re.search(r"Using network (\w[\w ]*\w)", text):
        seen.networks[match[1]] += 1
        seen.first = seen.first or line
    if "NET/IB : Using" in text or "NET/IBP" in text:
        seen.devices.update(re.findall(r"\]\s*([A-Za-z][\w.-]*):\d+/(?:IB|RoCE)", text))
    if "NET/Socket : Using" in text or "Bootstrap" in text:
        names = re.findall(r"(?:\[\d+\]|Using |, )([a-z][\w.-]*):[0-9a-f.:]+", text)
        seen.interfaces.update(names)
        seen.named = seen.named or (line if names else None)
    if match := re.search(r" via (P2P/[\w ]+|SHM/?\w*|NET/[\w-]+(?:/\d+)*(?:/GDRDMA)?)", text):
        kind = match[1].split("/")[0]
        seen.transports[kind] += 1
        seen.gdr_channels += "GDRDMA" in text
    if match := re.search(r"GPU Direct RDMA (Disabled|Enabled) for HCA \d+ '(\w+)'", text):
        seen.devices.add(match[2])
        seen.gdr_off |= {match[2]} if match[1] == "Disabled" else set()
    if match := re.search(r"(\d+) coll channels", text):
        seen.channels = int(match[1])
    if "NVLS" in text:
        on = "is available" in text or re.search(r"[1-9]\d* nvls channels", text) is not None
        seen.nvls = on or bool(seen.nvls)
    for name, number in re.findall(r"(n[Rr]anks|nNodes|localRanks) (\d+)", text):
        name = name.replace("nranks", "nRanks")
        seen.counts[name] = max(int(number), seen.counts.get(name, 0))
    if match := re.search(r"(NCCL_\w+) set (?:by environment )?to (\S+)", text):
        seen.settings[match[1]] = match[2].rstrip(".")
        if match[1] == "NCCL_IB_DISABLE" and seen.settings[match[1]] != "0":
            seen.forbids = line


def network_facts(seen: Network) -> Mapping[str, str]:
    """The verdict and what it rests on, in words."""
    facts = {"network": _verdict(seen)}
    parts = [f"NCCL {seen.version}"] if seen.version else []
    parts += [seen.driver] if seen.driver else []
    parts += [counted(seen.counts["nRanks"], "rank")] if seen.counts.get("nRanks") else []
    parts += [f"{seen.counts['nNodes']} nodes"] if seen.counts.get("nNodes") else []
    parts += [f"{seen.channels} channels"] if seen.channels else []
    if seen.nvls is not None:
        parts.append(f"NVLS {'on' if seen.nvls else 'off'}")
    if seen.transports:
        ways = ", ".join(f"{kind} {count}" for kind, count in seen.transports.most_common())
        parts.append(f"connections {ways}")
    if seen.settings:
        parts.append(", ".join(f"{name}={value}" for name, value in sorted(seen.settings.items())))
    facts["nccl"] = "; ".join(parts)
    if unset := "; ".join(_to_unset(seen)):
        facts["unset"] = unset
    return facts


def _to_unset(seen: Network) -> Iterator[str]:
    """Settings that the log names and that NCCL does not take as meant, or that do harm."""
    for name, value in sorted(seen.settings.items()):
        wrong = wrong_value(name, value, devices=sorted(seen.devices) or None)
        row = UNWANTED.get(name)
        if wrong is not None:
            yield f"{wrong.what} ({wrong.fix})"
        elif row is not None and row.harms(value):
            yield f"{name}={value}: {row.reason}"


def _verdict(seen: Network) -> str:
    over = ", ".join(sorted(seen.interfaces)[:4])
    if seen.uses_sockets:
        text = f"TCP sockets{f' over {over}' if over else ''}"
        if seen.forbids is not None:
            return f"{text}: NCCL_IB_DISABLE={seen.settings['NCCL_IB_DISABLE']} forbids RDMA"
        if seen.devices:
            return f"{text} though {len(seen.devices)} RDMA ports are there: {_names(seen.devices)}"
        if seen.is_several_nodes is False and not seen.transports.get("NET"):
            return f"{text}; one node, so GPUs do not use it"
        if seen.is_several_nodes is None and not seen.transports.get("NET"):
            return f"{text}; how many nodes there are is not said"
        return f"{text}: no RDMA device was found"
    if not seen.networks:
        return "not said"
    text = f"{', '.join(seen.networks)}{f' over {_names(seen.devices)}' if seen.devices else ''}"
    between = seen.transports.get("NET", 0)
    if between and seen.gdr_channels == between:
        return f"{text}, GPUDirect RDMA on all {between} connections between nodes"
    if between and seen.gdr_channels:
        return f"{text}, GPUDirect RDMA on {seen.gdr_channels} of {between} connections"
    if between or seen.gdr_off:
        return f"{text}, without GPUDirect RDMA: data go through host memory"
    if seen.transports.get("SHM") and not seen.transports.get("P2P"):
        return f"{text}; on a node through host memory (SHM), not GPU to GPU"
    return text


def _names(devices: set[str]) -> str:
    return ", ".join(sorted(devices)[:8])


def network_causes(seen: Network) -> Iterator[Found]:
    """What the network's choice amounts to."""
    if seen.first is None:
        return
    if seen.uses_sockets and seen.devices:
        yield Found(id="ethernet-fallback", what=_verdict(seen), line=seen.forbids or seen.first)
    elif seen.uses_sockets and seen.forbids is not None and seen.is_between_nodes:
        yield Found(
            id="ethernet-fallback",
            what=f"{_verdict(seen)}; whether there are RDMA devices is not said",
            line=seen.forbids,
            is_certain=True,
            title="NCCL_IB_DISABLE sends everything between nodes over TCP",
            check="ls /sys/class/infiniband on each node: with devices there, unset it",
        )
    virtual = sorted(name for name in seen.interfaces if _VIRTUAL.match(name))
    if virtual and len(virtual) == len(seen.interfaces) and seen.is_between_nodes:
        yield Found(
            id="nccl-wrong-interface",
            what=f"NCCL takes {', '.join(virtual)}, which no other node can be reached over",
            line=seen.named or seen.first,
            check="`ip -br addr` on each node; name the interface that the others reach it by:"
            " NCCL_SOCKET_IFNAME=NAME",
        )
    between = seen.transports.get("NET", 0)
    ib = any(name.startswith("IB") for name in seen.networks)
    if ib and between and not seen.gdr_channels:
        yield Found(id="gdr-peermem-missing", what=_verdict(seen), line=seen.first)

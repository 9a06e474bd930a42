"""What NCCL_DEBUG=INFO says of the network: which was chosen, how GPUs reach each other."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.catalog.nccl import UNWANTED, wrong_value
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.seen import KEEP_NCCL, Found
from paceline.units import counted

_HCA = re.compile(r"\b(?:mlx[45]_\d+|mlx[45]_bond_\d+|bnxt_re\d+|irdma\d+|efa_\d+|rdmap\w+)\b")
"""Names that Linux's drivers and rdma-core give RDMA devices."""

_CONNECTED = re.compile(
    r": (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via ((?:P2P|SHM|NET)\b[^\n]*)"
)
_PLUGIN = re.compile(
    r"Loaded net plugin (?P<loaded>.+?) \(v\d|[Ll]oaded external (?:network )?plugin (?P<file>\S+)"
    r"|(?P<internal>[Uu]sing internal net|No plugin found|using internal implementation)"
)
"""How NCCL says which network plugin it took: src/plugin/net.cc, and src/net.cc before 2.26."""

_NO_PLUGIN = re.compile(r"(?:Could not find: |No plugin found \()(lib[\w.+-]*\w)")

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
    ways: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """Two ranks -> how they are connected, `NET/IB/GDRDMA`. Ranks count within a communicator."""

    plugin: str | None = None
    """The network plugin; `internal` where NCCL uses its own."""

    missing_plugin: str | None = None
    warnings: dict[str, Line] = field(default_factory=dict)
    """Each NCCL WARN once, and its first line."""

    is_cut: bool = False
    """Whether there were more lines than are kept."""

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

    @property
    def gdr(self) -> bool | None:
        """Whether all connections over a network use GPUDirect RDMA; None where nothing says it."""
        between = self.transports.get("NET", 0)
        if between or self.uses_sockets:
            return bool(between) and self.gdr_channels == between
        return False if self.gdr_off else None

    @property
    def refused(self) -> tuple[str, str] | None:
        """An RDMA device that a warning names though NCCL uses none, and the warning."""
        if not self.devices:
            for text in self.warnings:
                if match := _HCA.search(text):
                    return match[0], text
        return None


def read_network(lines: Sequence[Line]) -> Network | None:
    """What NCCL's lines say; None where there are none."""
    seen = Network()
    seen.is_cut = len(lines) >= KEEP_NCCL
    for line in lines:
        text = line.message
        if "NCCL WARN" in text:
            warning = text.split("NCCL WARN", 1)[1].strip()
            seen.warnings.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", warning), line)
            continue
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
    if match := _CONNECTED.search(text):
        ranks = min(int(match[1]), int(match[2])), max(int(match[1]), int(match[2]))
        way = "/".join(part for part in match[3].split("/") if not re.match(r"\d", part))
        seen.ways.setdefault(ranks, set()).add(way.strip())
    if match := _PLUGIN.search(text):
        seen.plugin = match["loaded"] or match["file"] or seen.plugin or "internal"
    if match := _NO_PLUGIN.search(text):
        seen.missing_plugin = match[1]
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


def network_fields(seen: Network) -> Mapping[str, Any]:
    """What was seen, field by field: what nothing says is None."""
    return {
        "network": sorted(seen.networks),
        "gdr": seen.gdr,
        "channels": seen.channels,
        "warnings": [
            {"text": text, "path": line.source, "line": line.number, "rank": line.rank}
            for text, line in seen.warnings.items()
        ],
        "verdict": _verdict(seen),
        "plugin": seen.plugin,
        "missing_plugin": seen.missing_plugin,
        "pairs": [
            {"ranks": list(ranks), "transports": sorted(ways)}
            for ranks, ways in sorted(seen.ways.items())
        ],
        "connections": dict(seen.transports),
        "first_lines_only": seen.is_cut,
        "version": seen.version,
        "nvls": seen.nvls,
        "num_ranks": seen.counts.get("nRanks"),
        "num_nodes": seen.counts.get("nNodes"),
        "devices": sorted(seen.devices),
        "interfaces": sorted(seen.interfaces),
        "settings": dict(sorted(seen.settings.items())),
        "unset": list(_to_unset(seen)),
    }


def network_facts(seen: Network) -> Mapping[str, str]:
    """The verdict and what it rests on, in words."""
    facts = {"network": _verdict(seen)}
    if seen.warnings:
        facts["warnings"] = "; ".join(_first(list(seen.warnings), _SHOWN_WARNINGS))
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
    if seen.plugin:
        lacks = f" ({seen.missing_plugin} not found)" if seen.missing_plugin else ""
        parts.append(f"network plugin {seen.plugin}{lacks if seen.plugin == 'internal' else ''}")
    facts["nccl"] = "; ".join(parts)
    if seen.ways:
        cut = f" (of NCCL's first {KEEP_NCCL:,} lines)" if seen.is_cut else ""
        facts["pairs"] = "; ".join(_pairs(seen)) + cut
    if unset := "; ".join(_to_unset(seen)):
        facts["unset"] = unset
    return facts


_SHOWN_WARNINGS = 3
_SHOWN_PAIRS = 8


def _pairs(seen: Network) -> Iterator[str]:
    """For each way, the pairs of ranks that are connected by it."""
    by_way: dict[str, list[str]] = {}
    for (first, second), ways in sorted(seen.ways.items()):
        by_way.setdefault(" + ".join(sorted(ways)), []).append(f"{first}-{second}")
    for way, pairs in sorted(by_way.items(), key=lambda item: -len(item[1])):
        yield f"{way} {', '.join(_first(pairs, _SHOWN_PAIRS))}"


def _first(texts: Sequence[str], most: int) -> list[str]:
    """The first texts, and how many more there are."""
    more = len(texts) - most
    return [*texts[:most], *([f"and {more:,} more"] if more > 0 else [])]


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
        if seen.refused is not None:
            name, warning = seen.refused
            return f"{text}: {name} is there and was not used: {warning}"
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

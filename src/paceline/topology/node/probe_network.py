"""Interfaces, names, ports and RDMA devices of this machine. Sends nothing."""

import ctypes.util
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from shutil import which
from typing import Any

from paceline.topology.node.facts import Interface, RdmaTexts
from paceline.topology.node.read_state import number_of_hex
from paceline.topology.probe import Look, driver_of, read_ports, run_tool, text_of

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux's netdevice(7)."""

_MODULES = (
    *("nvidia_peermem", "nv_peer_mem", "ib_uverbs", "ib_umad", "mlx5_ib", "efa", "gdrdrv"),
    *("amdgpu", "nvidia", "nvidia_uvm", "irdma", "bnxt_re", "hfi1"),
)
_PLUGINS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/aws-ofi-nccl/lib",
    "/opt/hpcx/nccl_rdma_sharp_plugin/lib",
)
"""Where images keep NCCL's network plugin. Source: aws-ofi-nccl's README, NVIDIA HPC-X."""


def find_interfaces() -> tuple[Interface, ...]:
    """Network interfaces with their IPv4 and IPv6 addresses."""
    if sys.platform != "linux":
        return read_ifconfig(run_tool(["ifconfig"], [])) if which("ifconfig") else ()
    six = _addresses_6()
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        four = _address_4(name)
        flags = number_of_hex(text_of(folder / "flags"))
        mtu = text_of(folder / "mtu")
        found.append(
            Interface(
                name=name,
                is_up=bool(flags & 1) and text_of(folder / "operstate") != "down",  # IFF_UP
                mtu=int(mtu) if mtu.isdecimal() else None,
                addresses=(*((four,) if four else ()), *six.get(name, ())),
                **_link(folder),
            )
        )
    return tuple(found)


def _link(folder: Path) -> dict[str, Any]:
    """Driver and rate of an interface. Pairs of containers and bridges state rates that they do not
    have: without a device only bonds and VLANs are taken at their word."""
    driver = driver_of(folder / "device" / "driver")
    kind = re.search(r"^DEVTYPE=(bond|vlan)$", text_of(folder / "uevent"), re.M)
    driver = driver or (kind[1] if kind else "")
    megabits = text_of(folder / "speed")  # -1, or no answer, where it is not known
    rate = int(megabits) * 1e6 / 8 if driver and megabits.isdecimal() else None
    return {"driver": driver, "bytes_per_s": rate or None}


def own_addresses() -> tuple[str, ...]:
    """What this machine's own name leads to: gloo listens there if nothing else is said."""
    return resolve(socket.gethostname())


def resolve(name: str) -> tuple[str, ...]:
    """Addresses of a name, IPv4 first; empty when it leads nowhere."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return tuple(sorted(addresses, key=lambda address: ":" in address))


def try_ports(ports: Iterable[int]) -> dict[int, str]:
    """Each port -> why nobody can listen on it; empty text when one can."""
    found = {}
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                found[port] = error.strerror or str(error)
            else:
                found[port] = ""
    return found


def probe_rdma(looks: list[Look], *, is_quick: bool) -> RdmaTexts:
    """NICs that move data without the CPU, and what is needed to use them."""
    ports = read_ports(looks)
    loaded = {line.partition(" ")[0] for line in text_of("/proc/modules").splitlines()}
    return RdmaTexts(
        ports=ports,
        devinfo=run_tool(["ibv_devinfo"], looks) if ports and not is_quick else "",
        device_files=tuple(sorted(str(each) for each in Path("/dev/infiniband").glob("uverbs*"))),
        modules=tuple(name for name in _MODULES if name in loaded),
        libraries={
            "libibverbs": _library("ibverbs"),
            "libnccl-net": _plugin(),
        }
        if ports and not is_quick
        else {},
    )


def _library(name: str) -> str | None:
    try:
        return ctypes.util.find_library(name)
    except (OSError, subprocess.SubprocessError):
        return None


def _plugin() -> str | None:
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_PLUGINS]
    for folder in folders:
        if folder and (found := sorted(Path(folder).glob("libnccl-net*.so*"))):
            return str(found[0])
    return _library("nccl-net")


def _address_4(name: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(
                asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
            )
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def _addresses_6() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in text_of("/proc/net/if_inet6").splitlines():
        cells = line.split()
        if len(cells) == 6 and not cells[0].startswith("fe80"):
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(cells[0]))
            found[cells[5]] = (*found.get(cells[5], ()), address)
    return found


def read_ifconfig(text: str) -> tuple[Interface, ...]:
    """The interfaces that `ifconfig` prints on a Mac.

    >>> read_ifconfig("lo0: flags=8049<UP,LOOPBACK> mtu 16384\\n\\tinet 127.0.0.1\\n")[0].mtu
    16384
    """
    found = []
    for block in re.split(r"^(?=\S)", text, flags=re.M):
        head = re.match(r"([\w.-]+): flags=\w+<([^>]*)>.*?mtu (\d+)", block)
        if head:
            four = re.findall(r"^\s+inet ([\d.]+)", block, re.M)
            six = re.findall(r"^\s+inet6 ([0-9a-f:]+) ", block, re.M)
            inactive = re.search(r"status: inactive", block)
            found.append(
                Interface(
                    name=head[1],
                    is_up="UP" in head[2].split(",") and not inactive,
                    mtu=int(head[3]),
                    addresses=(*four, *(each for each in six if not each.startswith("fe80"))),
                )
            )
    return tuple(found)

"""Which of this machine's addresses others reach, and how addresses are written.

IPv4 and IPv6. Where a host has both, IPv4 is taken.
"""

import socket
import struct
import sys
from pathlib import Path
from typing import Any

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux's netdevice(7)."""

_INTERFACES_6 = Path("/proc/net/if_inet6")
"""Linux: address in hexadecimal, four numbers, interface."""


def address_toward(host: str) -> str:
    """This machine's address from which a host is reached; nothing is sent.

    Raises:
        OSError: There is no way there, or no such host.

    >>> address_toward("127.0.0.1")
    '127.0.0.1'
    """
    first: OSError | None = None
    for family, place in _places(host, 9):  # any port will do
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            first = first or error
    raise first or OSError(f"{host} has no address")


def bound_socket(host: str, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket of a host's family, bound to it.

    Args:
        port: 0 for any that is free.

    Raises:
        OSError: The port is taken, or this machine has no such address.
    """
    family, place = _places(host, port)[0]
    bound = socket.socket(family, kind)
    try:
        if kind == socket.SOCK_STREAM:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


def join_address(host: str, port: int) -> str:
    """One word for a host and a port, an IPv6 address in brackets (RFC 3986, 3.2.2).

    >>> join_address("10.0.0.1", 4711), join_address("::1", 4711)
    ('10.0.0.1:4711', '[::1]:4711')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port.

    >>> split_address("[::1]:4711")
    ('::1', 4711)
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _places(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    places = [(int(family), place) for family, _, _, _, place in found]
    return sorted(places, key=lambda each: each[0] != socket.AF_INET)


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None when none has, or it cannot be told."""
    if address.startswith("127.") or address == "::1":
        return "lo0" if sys.platform == "darwin" else "lo"
    if sys.platform != "linux":
        return None
    return _interface_of_6(address) if ":" in address else _interface_of_4(address)


def _interface_of_6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        lines = _INTERFACES_6.read_text().splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines)
    return next((row[-1] for row in rows if row[0] == wanted), None)


def _interface_of_4(address: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
                )
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None

"""Which of this machine's addresses others reach, and which machine it is.

Leaves out IPv6: the controller listens on IPv4 alone.
"""

import socket
import struct
import sys
from pathlib import Path

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux's netdevice(7)."""


def address_toward(host: str) -> str:
    """This machine's IPv4 address from which a host is reached; nothing is sent.

    Raises:
        OSError: There is no way there, or no such host.

    >>> address_toward("127.0.0.1")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # any port will do
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None when none has, or it cannot be told."""
    if address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    if sys.platform != "linux":
        return None
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


def machine() -> str:
    """What tells this machine, since its last start, from every other: their monotonic clocks and
    process ids have nothing to do with each other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()

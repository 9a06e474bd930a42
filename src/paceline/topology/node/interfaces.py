"""Which network interface NCCL and gloo take, by their rules, and what a variable names."""

from collections.abc import Sequence

from paceline.topology.node.facts import Interface


def named_by_nccl(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Those that a value of NCCL_SOCKET_IFNAME lets NCCL take.

    A list of beginnings of names; `=` before it: whole names; `^`: all but these.
    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.

    >>> eth, lo = (Interface(name=n, is_up=True, mtu=1500, addresses=()) for n in ("eth0", "lo"))
    >>> [each.name for each in named_by_nccl("^lo,docker", (eth, lo))]
    ['eth0']
    """
    excludes = value.startswith("^")
    rest = value.removeprefix("^")
    exact = rest.startswith("=")
    words = [word for word in rest.removeprefix("=").split(",") if word]

    def is_named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [each for each in interfaces if is_named(each.name) != excludes]


def taken_by_nccl(value: str | None, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL would take, best first; those without an address it cannot.

    Source: NCCL src/misc/socket.cc, ncclFindInterfaces: `ib*` first, then all but docker and lo,
    then docker, then lo.
    """
    usable = [each for each in interfaces if each.is_up and each.addresses]
    if value:
        return named_by_nccl(value, usable)
    first = [each for each in usable if each.name.startswith("ib")]
    docker = [each for each in usable if each.name.startswith("docker")]
    loopback = [each for each in usable if each.is_loopback]
    others = [each for each in usable if each not in (*first, *docker, *loopback)]
    return first or others or docker or loopback


def named_by_gloo(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Those of a value of GLOO_SOCKET_IFNAME: whole names, apart by commas.

    Source: PyTorch, torch.distributed, common environment variables.
    """
    words = [word.strip() for word in value.split(",") if word.strip()]
    return [each for each in interfaces if each.name in words]

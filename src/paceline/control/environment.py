"""The environment that an agent gives its workers: threads, addresses, and NCCL's and torch's
watchdogs. What the operator has set is left as it is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.catalog.load import read_rows
from paceline.control.adaptive_timeouts import meet_limit_s
from paceline.control.network import address_toward, interface_of
from paceline.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable that recovery rests on."""

    value: str
    otherwise: str
    """What any other value does: one line."""

    is_needed: bool = False
    """Whether nothing can be recovered in place without it."""


RECOVERY = read_rows("recovery_variables.toml", Setting, key=None)
"""What agents set for their workers, unless the operator has."""

CONNECT_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds in which each call of NCCL is through on the host, or raises "NCCL timeout in" (torch's
NCCLUtils.hpp). The first collective of a kind waits there for its communicator and for connections
to all peers, which some reach late: they compile, or read data. So it has what a collective has.
Nothing frees a rank from there: when a peer dies meanwhile, the controller ends its process."""


def undone(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Variables that the operator has set otherwise than recovery needs, by name.

    >>> list(undone({"NCCL_NVLS_ENABLE": "2", "TORCH_NCCL_BLOCKING_WAIT": "no"}))
    ['NCCL_NVLS_ENABLE']
    >>> list(undone({"TORCH_DISTRIBUTED_DEBUG": "detail"}))
    ['TORCH_DISTRIBUTED_DEBUG']
    """
    found = {name: environment[name].strip().lower() for name in RECOVERY if name in environment}
    return {
        name: RECOVERY[name]
        for name, value in found.items()
        if _READ_AS.get(value, value) != RECOVERY[name].value
    }


_READ_AS = (
    dict.fromkeys(("n", "no", "f", "false"), "0")
    | dict.fromkeys(("y", "yes", "t", "true"), "1")
    | dict.fromkeys(("off", "info"), "OFF")
)
"""How torch also reads 0 and 1 (c10d's `getCvarBool`); debugging at INFO leaves recovery alone."""


def environment_of_workers(
    cluster: Cluster, controller: str, *, limit_s: float, without: str | None = None
) -> dict[str, str]:
    """What a launcher must set for every worker of this machine.

    Args:
        controller: Host of the controller, to which this machine's address is found.
    """
    environment = {key: value for key, value in os.environ.items() if key != without}
    num_ranks = cluster.ranks_per_node * cluster.num_nodes
    environment |= {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "PYTHONUNBUFFERED": "1",
    }
    for name, setting in RECOVERY.items():
        environment.setdefault(name, setting.value)
    environment.setdefault(CONNECT_LIMIT, str(round(max(limit_s, meet_limit_s(num_ranks)))))
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:  # the older name, which gives way to it
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, int(cluster.cores_per_rank or 1))))
    environment |= spins(environment)
    own = environment.setdefault("PACELINE_HOST", address_toward(controller))
    # Gloo would take the interface of the host's name, which may be one that nobody else reaches.
    interface = interface_of(own)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def spins(environment: Mapping[str, str]) -> dict[str, str]:
    """How often OpenMP's threads look for each other before they sleep, unless the operator has
    said how they wait.

    By itself libgomp looks 300,000 times, about a millisecond of a core that another process could
    have. 1000 is its own number for more threads than cores (GCC's manual, GOMP_SPINCOUNT).
    Measured on 2 cores with 2 threads, a step of one block: hidden 64 took 383 to 672 ms at a load
    of 15 and takes 40; with no other load 4.0 and 4.7; hidden 512 53 and 55.

    >>> spins({}), spins({"OMP_WAIT_POLICY": "ACTIVE"})
    ({'GOMP_SPINCOUNT': '1000'}, {})
    """
    if environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return {}
    return {"GOMP_SPINCOUNT": "1000"}


def script_environment(
    rank: int, *, num_ranks: int, port: int, restarts: int, threads: int
) -> dict[str, str]:
    """What torchrun would put into a rank's environment, and how often it was started again.

    >>> script_environment(1, num_ranks=4, port=29500, restarts=0, threads=1)["LOCAL_RANK"]
    '1'
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # A process that C++ aborts, as gloo does where sizes differ, then says where it stood.
        "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "PACELINE_RESTART": str(restarts),
        "OMP_NUM_THREADS": str(threads),
        **spins(os.environ),
        "PYTHONUNBUFFERED": "1",
    }

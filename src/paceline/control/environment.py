"""The environment that an agent gives its workers: threads, addresses, and NCCL's and torch's
watchdogs. What the operator has set is left as it is.
"""

import os

from paceline.control.network import address_toward, interface_of
from paceline.control.patience import meet_limit_s
from paceline.topology import Cluster

NCCL = {
    # The controller decides who ends. By default (3) torch's watchdog ends each survivor too.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog sleeps four times as long over an error, with a lock that leaving a group takes.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # One rank's error makes the monitors of all ranks end their processes, 8 minutes later.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The monitor ends a process whose watchdog waits in CUDA for 8 minutes.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # An error of CUDA in the watchdog ends the process before it can report anything.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Only a communicator that does not block has a time limit while it is made.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # Aborts hang with NVLink SHARP, say NVIDIA (nvidia-resiliency-ext, usage guide). It costs
    # bandwidth inside of a node with NVSwitch: how much is to be measured there.
    "NCCL_NVLS_ENABLE": "0",
}
"""Read in torch 2.13's ProcessGroupNCCL.hpp and main's ProcessGroupNCCL.cpp."""

CONNECT_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds in which each call of NCCL is through on the host, or raises "NCCL timeout in" (torch's
NCCLUtils.hpp). The first collective of a kind waits there for its communicator and for connections
to all peers, which some reach late: they compile, or read data. So it has what a collective has.
Nothing frees a rank from there: when a peer dies meanwhile, the controller ends its process."""


def environment_of_workers(
    cluster: Cluster, controller: str, *, limit_s: float, without: str | None = None
) -> dict[str, str]:
    """What a launcher must set for every worker of this machine.

    Args:
        controller: Host of the controller, to which this machine's address is found.
        limit_s: For one operation between accelerators.
        without: A name that is not handed on.
    """
    environment = {key: value for key, value in os.environ.items() if key != without}
    num_ranks = cluster.ranks_per_node * cluster.num_nodes
    environment |= {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in NCCL.items():
        environment.setdefault(name, value)
    environment.setdefault(CONNECT_LIMIT, str(round(max(limit_s, meet_limit_s(num_ranks)))))
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:  # the older name, which gives way to it
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, int(cluster.cores_per_rank or 1))))
    own = environment.setdefault("PACELINE_HOST", address_toward(controller))
    # Gloo would take the interface of the host's name, which may be one that nobody else reaches.
    interface = interface_of(own)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment

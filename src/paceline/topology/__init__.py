"""What there is: the declared or detected cluster."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.topology.cluster import Cluster, Known
    from paceline.topology.find import find_cluster
    from paceline.topology.levels import Level, find_levels
    from paceline.topology.machine import Machine, find_local_machine
    from paceline.topology.read_nvidia import FoundGpu

__all__ = [
    "Cluster",
    "FoundGpu",
    "Known",
    "Level",
    "Machine",
    "find_cluster",
    "find_levels",
    "find_local_machine",
]

_WHERE = {
    "Cluster": "cluster",
    "FoundGpu": "read_nvidia",
    "Known": "cluster",
    "Level": "levels",
    "Machine": "machine",
    "find_cluster": "find",
    "find_levels": "levels",
    "find_local_machine": "machine",
}


def __getattr__(name: str) -> Any:
    """These bring the job file's models, which a node that is looked at does without."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

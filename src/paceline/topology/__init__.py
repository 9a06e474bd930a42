"""What there is: the declared or detected cluster."""

from paceline.topology.cluster import Cluster, Known
from paceline.topology.find import find_cluster
from paceline.topology.levels import Level, find_levels
from paceline.topology.machine import Gpu, Machine, find_local_machine

__all__ = [
    "Cluster",
    "Gpu",
    "Known",
    "Level",
    "Machine",
    "find_cluster",
    "find_levels",
    "find_local_machine",
]

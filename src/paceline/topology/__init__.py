"""What there is: the declared or detected cluster."""

from paceline.topology.cluster import Cluster, Known
from paceline.topology.find import find_cluster
from paceline.topology.machine import Gpu, Machine, find_local_machine

__all__ = ["Cluster", "Gpu", "Known", "Machine", "find_cluster", "find_local_machine"]

"""Clusters that tests plan for."""

from paceline.topology import Cluster


def h100s(*, num_nodes: int, ranks_per_node: int, is_local: bool = False) -> Cluster:
    """Nodes with H100s, of whose speed and links nothing is known."""
    return Cluster(
        accelerator="H100-SXM",
        is_local=is_local,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        backend="nccl",
        cores_per_rank=None,
        memory_bytes=1,
        usable_bytes=1,
        overhead_bytes=0,
        peak_flops_per_s={},
        memory_bytes_per_s=None,
        link_bytes_per_s=None,
        network_bytes_per_s=None,
        known={},
    )

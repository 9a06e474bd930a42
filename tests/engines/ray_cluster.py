"""A Ray cluster of several nodes on this machine, until standard input ends.

python ray_cluster.py NODES CPUS
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Prints the address when all nodes are there."""
    nodes, cpus = int(sys.argv[1]), int(sys.argv[2])
    quiet = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus} | quiet)
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=cpus, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    print(f"address {cluster.address}", flush=True)
    try:
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()

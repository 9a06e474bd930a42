"""What a plan warns of where a job's ranks may be pods."""

from collections.abc import Iterator

from paceline.job import Job
from paceline.plan.decision import Caution
from paceline.topology import Cluster
from paceline.topology.places import has_other_place, lacks_rdma, pods_lack_rdma

_RESOURCE = "set kubernetes.rdma_resource to what `kubectl describe node` counts RDMA devices as"


def pods_over_tcp(job: Job, cluster: Cluster) -> Iterator[Caution]:
    """The pods' own network is in no file: its rate is assumed, or not the plan's."""
    rate, link = cluster.network_bytes_per_s, cluster.network_link
    is_assumed = cluster.known["network_bytes_per_s"] == "estimated"
    if cluster.is_local or not link or not rate:
        return
    if lacks_rdma(job) and is_assumed:
        unused = "" if job.spec.cluster.network == "auto" else " and not cluster.network"
        yield Caution(
            about="network",
            what=f"the pods ask for no RDMA device, so NCCL uses TCP{unused}; the rate of their "
            f"network is not known, {8e-9 * rate:.4g} Gb/s a node are assumed",
            fix=f"{_RESOURCE}, or cluster.network to what the pods have, such as 25GbE",
        )
    elif pods_lack_rdma(job) and has_other_place(job) and cluster.uses_rdma:
        yield Caution(
            about="network",
            what=f"the plan counts on {link}, which the pods of the section kubernetes do not "
            "reach: they ask for no RDMA device, so NCCL uses TCP there",
            fix=f"{_RESOURCE}; `paceline run --on kubernetes` plans again, over TCP",
        )

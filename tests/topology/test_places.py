"""A job with sections for several places is planned for the network of each."""

from pathlib import Path

import pytest
from tests.plan.scene import HERE

from paceline.job import Job, parse_job
from paceline.topology import find_cluster
from paceline.topology.places import at_place

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 64, steps: 1000}
slurm: {partition: gpu}
kubernetes: {image: "registry/x:1"}
"""


def uses_rdma(job: Job) -> bool:
    return find_cluster(job.spec.cluster, job, HERE).uses_rdma


@pytest.mark.parametrize(
    ("place", "is_rdma"),
    [("slurm", True), ("srun", True), ("ssh", True), ("kubernetes", False), ("ray", False)],
)
def test_pods_without_an_rdma_device_do_not_take_rdma_from_slurm(place: str, is_rdma: bool):
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    assert uses_rdma(at_place(job, place)) is is_rdma
    given = parse_job(
        JOB, source="j", folder=Path("/n"), overrides=["kubernetes.rdma_resource=rdma/hca"]
    )
    assert uses_rdma(at_place(given, place))


def test_a_plan_without_a_place_takes_the_nodes_network_where_not_all_places_are_pods():
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    assert uses_rdma(job)
    pods = parse_job(JOB.replace("slurm: {partition: gpu}\n", ""), source="j", folder=Path("/n"))
    assert not uses_rdma(pods)

"""What a job needs of its nodes, out of its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.job import Job
from paceline.job.evaluate_rules import most_kept
from paceline.plan import Plan
from paceline.prepare.checked import Checked, find_checked
from paceline.render.environment import removals


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the judgement has to know of a job."""

    num_nodes: int
    ranks_per_node: int
    backend: str
    """`nccl`, `gloo`, `mlx`."""

    accelerator: str = "cpu"
    """Name in the catalog, or as the machine reports it."""

    is_apart: bool = False
    """Whether the nodes are different machines."""

    has_host_names: bool = True
    """Whether the nodes are called as the network calls them; Ray has numbers of its own."""

    reads_visible: bool = True
    """Whether CUDA_VISIBLE_DEVICES is what the ranks will have. Ray gives the agent's task other
    GPUs than the task that looks."""

    wants_rdma: bool = False
    rank_bytes: int = 0
    """Bytes that a rank needs on its accelerator, or in host memory where ranks run on CPUs."""

    host_bytes: int = 0
    """Bytes needed of one node's own memory: what is offloaded and, on CPUs, the ranks'."""

    checkpoint_bytes: int = 0
    num_checkpoints: int = 0
    """That are there at once: those kept, and the one that is being written."""

    is_copied: bool = False
    """Whether checkpoints are copied to another storage, too."""

    link_bytes_per_s: float | None = None
    """Between ranks of a node, as the plan takes it."""

    network_bytes_per_s: float | None = None
    """Between nodes, of a node and direction."""

    compiles: bool = False
    sharding: str = "none"
    tensor: int = 1
    harmful: Mapping[str, str] = field(default_factory=dict)
    """Environment variable that must not be left set -> what it does."""

    data_checked: Checked | None = None
    """The last `paceline data check` of the job's files; None where there was none."""

    has_agents: bool = True
    """Whether Paceline's agents start the ranks: they tell gloo its interface, and raise the soft
    limit of open files."""

    is_strict: bool = True
    """Whether shared memory counts that any training program's data workers would need, and not
    only what this job's own ranks use. A quick look, as before a run, is not strict."""

    rates_known: Literal["measured", "cited", "declared", "estimated"] = "estimated"
    """How the rate that all-reduce is held against is known."""


def need_of(job: Job, plan: Plan, *, place: str) -> Need:
    """What this plan needs of each of its nodes."""
    cluster = plan.cluster
    rank_bytes = plan.estimate.memory.total_bytes or 0
    on_cpu = cluster.accelerator == "cpu"
    return Need(
        num_nodes=cluster.num_nodes,
        ranks_per_node=cluster.ranks_per_node,
        backend=cluster.backend,
        accelerator=cluster.accelerator,
        is_apart=place != "local" and cluster.num_nodes > 1,
        has_host_names=place != "ray",
        reads_visible=place != "ray",
        wants_rdma=cluster.num_nodes > 1 and plan.cluster.uses_rdma,
        rank_bytes=rank_bytes,
        host_bytes=plan.host_bytes + (rank_bytes * cluster.ranks_per_node if on_cpu else 0),
        checkpoint_bytes=plan.estimate.num_checkpoint_bytes,
        num_checkpoints=most_kept(job.spec),
        is_copied=job.spec.checkpoint.copy_to is not None,
        link_bytes_per_s=cluster.link_bytes_per_s,
        network_bytes_per_s=cluster.network_bytes_per_s,
        compiles=job.spec.train.compile,
        data_checked=find_checked(job),
        has_agents=plan.engine == "paceline",
        sharding=plan.layout.sharding,
        tensor=plan.layout.tensor,
        harmful={each.name: each.reason for each in removals(plan)},
        rates_known=cluster.known.get(
            "link_bytes_per_s" if cluster.num_nodes == 1 else "network_bytes_per_s", "estimated"
        ),
    )

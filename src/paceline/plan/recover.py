"""Which tiers of recovery state a plan has, and the one it takes: `recovery.state`."""

from collections.abc import Iterator

from paceline.choices.optimizers import OPTIMIZERS
from paceline.errors import Problem
from paceline.estimate.cost import Failures
from paceline.estimate.recovery import (
    Machine,
    Reliability,
    StatePlan,
    Training,
    copies_of,
    state_plan,
)
from paceline.job import Job
from paceline.plan.decision import Plan
from paceline.plan.host import host_limit_bytes, host_limit_source
from paceline.profile import ModelProfile
from paceline.profile.block import expert_parameters


def plan_state(plan: Plan, job: Job, failures: Failures, read_s: float) -> StatePlan | None:
    """The tiers of a plan; None when a step's time is unknown.

    Args:
        plan: With its layout and estimate.
        job: Of which it is the plan.
        failures: Their rate, and the seconds of saving and restarting.
        read_s: Seconds in which a checkpoint is read.
    """
    cluster, step_s = plan.cluster, plan.estimate.step_s
    if step_s is None:
        return None
    asked = job.spec.recovery.state
    return state_plan(
        plan.layout,
        Training(
            num_parameters=plan.profile.num_trained_parameters,
            num_routed=_num_routed(plan.profile),
            moment_bytes=OPTIMIZERS[plan.optimizer].moment_bytes,
            step_s=step_s,
            save_s=failures.save_s,
            write_s=failures.background_s,
            checkpoint_interval_s=plan.checkpoint_every * step_s,
        ),
        Machine(
            # On this machine ranks stand for nodes where the job asks for it, to try it.
            num_domains=cluster.num_ranks
            if cluster.is_local and asked == "memory"
            else cluster.num_nodes,
            ranks_per_node=cluster.ranks_per_node,
            network_bytes_per_s=cluster.network_bytes_per_s,
            copy_bytes_per_s=cluster.copy_bytes_per_s,
            shares_cores=cluster.backend == "gloo",
            sends_copies=job.spec.recovery.snapshot_peers,
            free_host_bytes=host_limit_bytes(cluster, "cpu")
            - (plan.host_bytes if plan.layout.offload == "cpu" else 0),
            engine=None if plan.engine == "paceline" else plan.engine,
        ),
        _reliability(failures, read_s, is_local=cluster.is_local),
        asked=None if asked == "auto" else asked,
    )


def _num_routed(profile: ModelProfile) -> int:
    """Trained parameters of routed experts, of the whole model."""
    if profile.adapter is not None:
        return 0
    return sum(int(each.count) * expert_parameters(each) for each in profile.blocks)


def _reliability(failures: Failures, read_s: float, *, is_local: bool) -> Reliability:
    rate = failures.rank_mtbf_s
    if not is_local:
        return Reliability(rank_mtbf_s=rate, restart_s=failures.restart_s)
    return Reliability(
        rank_mtbf_s=rate, restart_s=_RESTART_HERE_S + read_s, in_place_s=_IN_PLACE_HERE_S
    )


_RESTART_HERE_S = 2.7
"""From a kill to the next step when all workers start again: 2.74 s, the median of 12 runs of two
ranks (docs/benchmarks/recovery.md, before ranks were replaced in place)."""

_IN_PLACE_HERE_S = 0.3
"""From a kill to the next step when the others stay: 0.15 to 0.31 s at 4 ranks (a prototype on 2
cores)."""


def check_state(plan: Plan, job: Job, state: StatePlan | None) -> Iterator[Problem]:
    """A tier that the job names must exist in the layout."""
    asked, layout, cluster = job.spec.recovery.state, plan.layout, plan.cluster
    where = job.where("recovery.state")
    if asked in ("replica", "memory") and plan.engine != "paceline":
        yield Problem(
            code="P005",
            what=f"recovery.state is {asked}, and {plan.engine} keeps checkpoints alone: "
            "Paceline's own runtime has the other tiers",
            where=where,
            fix="set recovery.state to checkpoint or auto, or leave engine out",
        )
        return
    if asked == "replica" and copies_of(layout) < 2:
        yield Problem(
            code="P005",
            what=f"recovery.state is replica, and in {layout.name} no other rank holds the same "
            "parameters and optimizer state",
            where=where,
            fix="set layout.sharding to hybrid (or none), or recovery.state to memory or auto",
        )
    domains = cluster.num_ranks if cluster.is_local else cluster.num_nodes
    if asked == "memory" and domains < 2 and job.spec.recovery.snapshot_peers:
        yield Problem(
            code="P005",
            what=f"recovery.state is memory, and on {cluster.name} there is no second "
            f"{'rank' if cluster.is_local else 'node'} for its copy",
            where=where,
            fix="set cluster.nodes to 2 or more, or recovery.state to checkpoint or auto",
        )
    elif asked == "memory" and state and (why := state.tier("memory").why_not):
        yield Problem(
            code="P005",
            what=f"recovery.state is memory, and {why} ({host_limit_source(cluster, 'cpu')})",
            where=where,
            fix="set cluster.host_memory to what a node has, or recovery.state to checkpoint or "
            "auto",
        )

"""What a job needs at the least, and what would make it need less."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Protocol

from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.errors import PlanError
from paceline.estimate import price_one
from paceline.job import Job
from paceline.job.evaluate_rules import most_kept
from paceline.parallel.layout import Layout
from paceline.plan.case import case_of_plan
from paceline.plan.decision import Plan
from paceline.units import counted, format_bytes


class Replan(Protocol):
    """The planner, for a changed job: `partial(plan_job, facts=facts)`."""

    def __call__(self, job: Job, /, *, advise: bool = True) -> Plan: ...


_MOST_DOUBLINGS = 12
_EXPOSED_SHARE = 0.1
"""Share of a step's time that communication may take before the network counts as too slow."""

_RATES = tuple(2.0 ** (-step / 2) for step in range(25))
"""Shares of the network's rate that are tried: from all of it down to a 4096th, by half octaves."""

_AT_ONCE = 1e6
"""Times the network's rate at which messages take no time."""

STATE_BYTES_PER_PARAMETER = 16
"""Float32 parameter, gradient and two moments of Adam; also bf16 with a float32 master copy.

Source: ZeRO, arXiv:1910.02054, section 3.1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The least that the job runs on, each with how it was found."""

    ranks: int | None
    """None where no number of the accelerators that there are fits."""

    memory_bytes: int
    """Memory of one accelerator, with as many of them as the job has."""

    network_bytes_per_s: float | None
    """Network rate of a node; None where it has no part, or is unknown."""

    storage_bytes: int
    basis: str
    """How these were found."""

    @property
    def text(self) -> str:
        """Ranks, or memory of an accelerator: `32 ranks, or 24 GiB an accelerator`."""
        memory = f"{format_bytes(self.memory_bytes)} an accelerator"
        if self.ranks is None:
            return f"{memory}: no number of those there are fits"
        return f"{counted(self.ranks, 'rank')}, or {memory} with as many as there are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change that makes the job need less memory."""

    change: str
    field: str
    """What to write in the job."""

    saves_bytes: int
    """Bytes saved on the fullest rank, estimated from the parts of its memory."""

    costs: str
    """What it takes in return."""


def requirements_of(plan: Plan, job: Job) -> Requirements:
    """The least for a plan that fits: from the sizes of its state and its traffic."""
    memory, usable = plan.estimate.memory, plan.limit_bytes
    parts = memory.parts
    fixed = parts.get("overhead") or 0
    state = STATE_BYTES_PER_PARAMETER * plan.profile.num_trained_parameters
    return Requirements(
        ranks=min(plan.cluster.num_ranks, max(1, ceil(state / max(1, usable - fixed)))),
        memory_bytes=memory.known_bytes,
        network_bytes_per_s=_least_network(plan),
        storage_bytes=most_kept(job.spec) * plan.estimate.num_checkpoint_bytes,
        basis=(
            f"ranks: {format_bytes(state)} of state fully sharded, activations left out, and at "
            f"most those of the plan, which fits; memory: {plan.layout_name}'s fullest rank; "
            f"network: where messages take {_EXPOSED_SHARE:.0%} of a step, and at most what there "
            "is; storage: the checkpoints that are kept and the one being written"
        ),
    )


def requirements_of_refused(
    job: Job, replan: Replan, available_bytes: int, needed_bytes: int | None
) -> tuple[Requirements, Plan]:
    """The least for a job that fits nowhere, and the plan it would have with just that memory: the
    leanest layout, which the refusal names as well. Nodes are doubled until something fits.

    Args:
        job: That was refused.
        available_bytes: Memory of an accelerator that there is.
        needed_bytes: Of a rank, as the planner's refusal says.

    Raises:
        PlanError: It is not memory that it lacks.
    """
    plan = _with_more_memory(job, replan, available_bytes, needed_bytes)
    bigger = _with_more_nodes(job, replan)
    found = requirements_of(plan, job)
    ranks = None if bigger is None else bigger.cluster.num_ranks
    how = (
        f"ranks: the planner, with twice the nodes until something fits ({bigger.layout_name})"
        if bigger is not None
        else "ranks: no number of nodes that was tried fits"
    )
    return (
        replace(
            found,
            ranks=ranks,
            memory_bytes=plan.cluster.memory_bytes,
            basis=f"{how}; memory: what the leanest layout takes, with the head-room",
        ),
        plan,
    )


def _with_more_memory(job: Job, replan: Replan, low: int, needed: int | None) -> Plan:
    """The leanest plan with the memory that it takes; else, where something beside memory lacks as
    well, one with twice the memory until something fits."""
    if needed is not None:
        least = ceil((needed + 1) / (1 - job.spec.plan.head_room))
        if (plan := _try(_with_memory(job, least), replan)) is not None:
            return plan
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        if (plan := _try(_with_memory(job, low * 2**doublings), replan)) is not None:
            return plan
    return replan(job)  # raises, in the planner's own words


def _with_more_nodes(job: Job, replan: Replan) -> Plan | None:
    """With twice the nodes and, where it must divide, twice the batch."""
    for doublings in range(1, _MOST_DOUBLINGS):
        times = 2**doublings
        train = job.spec.train
        for batch in (train.global_batch, train.global_batch * times):
            spec = replace(
                job.spec,
                cluster=replace(job.spec.cluster, nodes=job.spec.cluster.nodes * times),
                train=replace(train, global_batch=batch),
            )
            try:
                return replan(replace(job, spec=spec), advise=False)
            except PlanError as error:
                if error.problems[0].code == "P001":
                    break  # it divides, and a larger batch needs no less memory
    return None


def _with_memory(job: Job, num_bytes: int) -> Job:
    """On a card that may be no catalog's: the memory has no line of the job."""
    lines = {place: line for place, line in job.lines.items() if place != ("cluster", "memory")}
    cluster = replace(job.spec.cluster, memory=num_bytes)
    return replace(job, spec=replace(job.spec, cluster=cluster), lines=lines)


def _try(job: Job, replan: Replan) -> Plan | None:
    try:
        return replan(job, advise=False)
    except PlanError:
        return None


def _least_network(plan: Plan) -> float | None:
    """The slowest of `_RATES` at which the plan's messages take their share of a step."""
    rate = plan.cluster.network_bytes_per_s
    if plan.cluster.num_nodes == 1 or not rate or not plan.estimate.step_s:
        return None

    def step_s(share: float) -> float:
        cluster = plan.cluster.with_network_share(share)
        return price_one(plan.layout, case_of_plan(plan, cluster)).step_s or inf

    most = step_s(_AT_ONCE) / (1 - _EXPOSED_SHARE)
    shares = [share for share in _RATES if step_s(share) <= most]
    return rate * min(shares, default=1.0)


def savings(plan: Plan, job: Job, available_bytes: int) -> list[Saving]:
    """Changes that each make the fullest rank need less, the largest saving first."""
    found = [each for each in _savings(plan, job, available_bytes) if each.saves_bytes > 0]
    return sorted(found, key=lambda each: -each.saves_bytes)


def _savings(plan: Plan, job: Job, available_bytes: int) -> Iterator[Saving]:
    layout, parts = plan.layout, plan.estimate.memory.parts

    def size(*names: str) -> int:
        return sum(parts.get(name) or 0 for name in names)

    activations, optimizer = size("activations"), size("optimizer", "master copy")
    yield from _by_layout(layout, activations, optimizer, size("parameters", "gradients"))
    if plan.profile.seq_len:
        yield Saving(
            change=f"samples half as long: {plan.profile.seq_len // 2} tokens",
            field=f"data.seq_len: {plan.profile.seq_len // 2}",
            saves_bytes=activations // 2,
            costs="shorter context",
        )
    state = optimizer + size("parameters", "gradients")
    yield Saving(
        change="twice the nodes, the state sharded or split over all of them",
        field=f"cluster.nodes: {2 * plan.cluster.num_nodes}",
        saves_bytes=state // 2,
        costs="twice the accelerators; the step is shorter",
    )
    if plan.profile.adapter is None:
        yield Saving(
            change="low-rank adapters on weights that are kept in bf16",
            field="train.adapter: {rank: 16}",
            saves_bytes=optimizer + size("gradients") + size("parameters") // 2,
            costs="fine-tunes a model that is trained already; the adapters' own state is small",
        )
        yield Saving(
            change="low-rank adapters on weights that are kept in 4 bits",
            field="train.adapter: {kind: qlora}",
            saves_bytes=optimizer + size("gradients") + size("parameters") * 7 // 8,
            costs="as above, and the weights are unpacked in every pass",
        )
    yield Saving(
        change="half the head-room",
        field=f"plan.head_room: {job.spec.plan.head_room / 2:g}",
        saves_bytes=int(available_bytes * job.spec.plan.head_room / 2),
        costs="less is left for fragmentation and for the estimate's error",
    )
    if job.spec.train.optimizer == "adamw":
        yield Saving(
            change="AdamW with moments of one byte",
            field="train.optimizer: adamw-8bit",
            saves_bytes=size("optimizer") * 3 // 4,
            costs="needs a library of its own with other engines; not yet usual in pretraining",
        )
        yield Saving(
            change="SGD with momentum instead of AdamW",
            field="train.optimizer: sgd",
            saves_bytes=size("optimizer") // 2,
            costs="another optimizer with another learning rate; transformers train worse with it",
        )


def _by_layout(layout: Layout, activations: int, optimizer: int, weights: int) -> Iterator[Saving]:
    if layout.offload == "none":
        yield Saving(
            change="optimizer state in the host's memory",
            field="layout.offload: cpu",
            saves_bytes=optimizer,
            costs="the state crosses PCIe twice a step",
        )
    if layout.recompute not in WHOLE_BLOCKS:
        yield Saving(
            change="every block computed again in the backward pass",
            field=f"layout.recompute: {WHOLE_BLOCKS[0]}",
            saves_bytes=round(0.8 * activations),
            costs="about a third more compute; 0.8 of the activations is a guess",
        )
    if layout.micro_batch > 1:
        yield Saving(
            change=f"micro-batches of {layout.micro_batch // 2}, twice as many accumulated",
            field=f"layout.micro_batch: {layout.micro_batch // 2}",
            saves_bytes=activations // 2,
            costs="smaller matrices, which run slower",
        )
    ranks = layout.data * layout.context
    if layout.sharding in ("none", "zero1", "zero2") and ranks > 1:
        kept = (optimizer if layout.sharding == "none" else 0) + weights
        yield Saving(
            change=f"everything sharded over the {ranks} data ranks",
            field="layout.sharding: full",
            saves_bytes=kept - kept // ranks,
            costs="1.5 times the communication",
        )

"""A job on many sizes of cluster, at several rates of failure: ours and others on equal faults."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import monotonic
from typing import Literal

import numpy as np

from paceline.errors import PlanError, Problem
from paceline.estimate.goodput import best_interval_s
from paceline.estimate.recovery import StatePlan, Tier
from paceline.job import Job
from paceline.job.failure_rates import FailuresSpec
from paceline.plan import Plan, plan_job
from paceline.plan.outlook import DEFAULTS, outlook
from paceline.plan.search_inputs import CanRun
from paceline.profile import ModuleFacts
from paceline.simulation.costs import Costs, Phase, System, costs_on_gloo, costs_on_nccl
from paceline.simulation.failures import DAY_S, Fault, draw_faults, expected_per_s
from paceline.simulation.goodput import Part
from paceline.simulation.machines import Machines
from paceline.simulation.renewal import play
from paceline.simulation.rhythm import Rhythm
from paceline.simulation.scene import Scene
from paceline.simulation.world import simulate

RATES = (1.0, 2.0, 4.0)
"""Times as often as the process says. Kokolis et al. measured 7.9 h between failures at 1,024 GPUs
where the rate of a node gives 28.8 h (arXiv:2410.21680)."""

_QUIET_S = 3.0
"""Runs that take less say nothing of their progress."""

SPARE_SHARE = 0.01
"""Share of the nodes kept as spares when nothing is said. A guess; ByteRobust keeps 4 for 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job on one size of cluster."""

    num_nodes: int
    ranks_per_node: int
    accelerator: str
    layout: str
    global_batch: int
    step_s: float
    step_known: Literal["estimated", "given"]
    state: StatePlan
    save_s: float
    write_s: float
    save_every: int
    """Steps, as planned."""

    num_spares: int
    costs: tuple[tuple[str, Costs], ...]
    """Name of the variant, and its phases."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def tier(self) -> Tier:
        """Where a lost rank's state comes from."""
        return self.state.chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One system on one size at one rate, over all seeds."""

    system: str
    num_nodes: int
    rate: float
    mtbf_s: float
    """Expected of the job."""

    useful: float
    """Mean share of the time, simulated."""

    useful_low: float
    useful_high: float
    """The highest of the seeds; `useful_low` is the lowest."""

    shares: dict[Part, float]
    """Mean by part; they sum to 1."""

    faults: float
    """Mean number of faults in a run."""

    recoveries: float | None
    """None for systems that are not our controller; so the others below."""

    from_checkpoint: float | None
    given_up: float | None
    downtime_s: float | None
    """Median from a fault to the end of the first step after it."""

    known: Literal["simulated"] = "simulated"


def make_case(
    job: Job,
    failures: FailuresSpec,
    num_nodes: int,
    *,
    job_nodes: int,
    num_spares: int | None = None,
    step_s: float | None = None,
    facts: ModuleFacts | None = None,
    can_run: CanRun | None = None,
) -> Case:
    """A job planned on so many nodes, with the phases of its recoveries.

    Args:
        job: Whose plan it is; its batch grows with the nodes.
        failures: Their rate decides the tier of state.
        job_nodes: That the job's batch is for.
        num_spares: Nodes besides; None is a hundredth.
        step_s: Seconds of a step, measured; None is the planner's estimate.
        facts: Of a module of the person's own, as `plan_job` takes them.
        can_run: As `plan_job` takes it.

    Raises:
        PlanError: No layout fits, or the time of a step is unknown.
    """
    job = _on(job, num_nodes, job_nodes)
    plan = plan_job(job, facts, can_run=can_run)
    known: Literal["estimated", "given"] = "estimated" if step_s is None else "given"
    step_s = plan.estimate.step_s if step_s is None else step_s
    if step_s is None:
        raise PlanError(_unknown_step(job, plan))
    plan = replace(plan, estimate=replace(plan.estimate, step_s=step_s))
    per_node = plan.cluster.ranks_per_node
    rank_mtbf_s = DAY_S * per_node / failures.at(num_nodes)
    view = outlook(plan, job, assumptions=replace(DEFAULTS, rank_mtbf_s=rank_mtbf_s))
    state = view.state
    assert state is not None, "the step's time is known"
    copy_s = state.tier(state.chosen).fetch_s
    variants: list[tuple[str, Costs]]
    if plan.cluster.backend == "gloo":
        variants = [("paceline", costs_on_gloo(copy_s=copy_s, reload_s=view.write_s))]
    else:
        variants = [
            (f"paceline, {word}", costs_on_nccl(copy_s=copy_s, reload_s=view.write_s, meet=meet))
            for word, meet in _MEETINGS
        ]
    return Case(
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        accelerator=plan.cluster.accelerator,
        layout=plan.layout_name,
        global_batch=plan.layout.global_batch,
        step_s=step_s,
        step_known=known,
        state=state,
        save_s=view.save_s,
        write_s=view.background_s,
        save_every=plan.checkpoint_every,
        num_spares=max(1, round(SPARE_SHARE * num_nodes)) if num_spares is None else num_spares,
        costs=tuple(variants),
    )


def with_phases(case: Case, phases: Mapping[str, Phase]) -> Case:
    """The case with phases that were measured elsewhere. With a `meet` of its own there is one
    variant."""
    variants = case.costs[:1] if "meet" in phases else case.costs
    changed = []
    for name, costs in variants:
        for phase_name, phase in phases.items():
            costs = costs.with_phase(phase_name, phase)
        changed.append(("paceline" if "meet" in phases else name, costs))
    return replace(case, costs=tuple(changed))


_MEETINGS: tuple[tuple[str, Literal["cited", "log2"]], ...] = (
    ("slow rendezvous", "cited"),
    ("fast rendezvous", "log2"),
)


def _on(job: Job, num_nodes: int, job_nodes: int) -> Job:
    spec = job.spec
    batch = max(1, round(spec.train.global_batch * num_nodes / job_nodes))
    cluster = replace(spec.cluster, nodes=num_nodes)
    train = replace(spec.train, global_batch=batch)
    # Limits are of the job's own size.
    wanted = replace(spec.plan, budget=None, deadline=None, objective="time", max_ranks=None)
    return replace(job, spec=replace(spec, cluster=cluster, train=train, plan=wanted))


def _unknown_step(job: Job, plan: Plan) -> Problem:
    return Problem(
        code="S003",
        what=f"the time of a step on {plan.cluster.name} is unknown, and goodput is counted in "
        "steps",
        where=job.where("cluster"),
        fix="say what you measured: --step 1.2s; or name an accelerator that the catalog knows "
        "(`paceline catalog accelerators`)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every case."""

    failures: FailuresSpec
    days: float = 30.0
    seeds: int = 3
    rates: tuple[float, ...] = RATES
    compare: tuple[System, ...] = ()
    max_restarts: int = 3
    tail: float = 0.0
    """Spread of the phases of our own recoveries, as `Scene.tail`."""

    @property
    def horizon_s(self) -> float:
        return self.days * DAY_S


def answer(
    case: Case, question: Question, on_progress: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Every system at every rate, on the same faults."""
    found: list[Result] = []
    began = monotonic()
    for rate in question.rates:
        failures = question.failures.times(rate)
        runs: dict[str, list[_Run]] = {}
        for seed in range(question.seeds):
            rng = np.random.default_rng([seed, case.num_nodes])
            faults = draw_faults(failures, case.num_nodes, question.horizon_s, rng)
            for run in _each_system(case, question, faults, seed):
                runs.setdefault(run.system, []).append(run)
            if monotonic() - began > _QUIET_S:
                on_progress(
                    f"{case.num_nodes:,} nodes, x {rate:g}, seed {seed + 1} of {question.seeds}: "
                    f"{len(faults):,} faults, {monotonic() - began:.0f} s so far"
                )
        mtbf_s = 1 / expected_per_s(failures, case.num_nodes)
        found += [_summed(case, rate, mtbf_s, each) for each in runs.values()]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    system: str
    shares: dict[Part, float]
    faults: int
    recoveries: int | None = None
    from_checkpoint: int | None = None
    given_up: int | None = None
    downtimes_s: tuple[float, ...] = ()


def _each_system(
    case: Case, question: Question, faults: Sequence[Fault], seed: int
) -> Iterator[_Run]:
    horizon_s = question.horizon_s
    for name, costs in case.costs:
        outcome = simulate(
            scene_of(case, costs, question), faults, np.random.default_rng([seed, 1])
        )
        yield _Run(
            system=name,
            shares=outcome.ledger.shares(horizon_s),
            faults=len(faults),
            recoveries=outcome.num_recoveries,
            from_checkpoint=outcome.from_checkpoint,
            given_up=outcome.num_given_up,
            downtimes_s=tuple(outcome.downtimes_s),
        )
    for system in question.compare:
        ledger = play(
            system,
            faults,
            rhythm=rhythm_of(system, case, question.failures),
            machines=Machines(case.num_spares, question.failures.repair),
            ranks=case.num_ranks,
            horizon_s=horizon_s,
        )
        yield _Run(system=system.name, shares=ledger.shares(horizon_s), faults=len(faults))


def scene_of(case: Case, costs: Costs, question: Question) -> Scene:
    """What our own controller lives through."""
    tier = case.state.tier(case.tier)
    # A tier inside one node helps when the node stays, which the kind of fault says.
    covered = tier.covered if tier.outlives_node is not False else 0.0
    every = 1 if tier.interval_s is None else max(1, round(tier.interval_s / case.step_s))
    return Scene(
        num_nodes=case.num_nodes,
        ranks_per_node=case.ranks_per_node,
        rhythm=Rhythm(
            step_s=case.step_s,
            slower_s=tier.step_s,
            save_every=case.save_every,
            save_s=case.save_s,
            write_s=case.write_s,
        ),
        costs=costs,
        tier=case.tier,
        covered=covered,
        memory_every=every if case.tier == "memory" else 1,
        num_spares=case.num_spares,
        repair_s=question.failures.repair,
        horizon_s=question.horizon_s,
        max_restarts=question.max_restarts,
        tail=question.tail,
    )


def rhythm_of(system: System, case: Case, failures: FailuresSpec) -> Rhythm:
    """The steps of another system, with saves of its own at the best interval for the rate."""
    every = None
    if system.lost == "checkpoint":
        mtbf_s = 1 / expected_per_s(failures, case.num_nodes)
        every = round(best_interval_s(system.save_s, mtbf_s, step_s=case.step_s) / case.step_s)
    return Rhythm(
        step_s=case.step_s,
        slower_s=case.step_s * system.stall_share / (1 - system.stall_share),
        slower_as="stall",
        save_every=every,
        save_s=system.save_s,
    )


def _summed(case: Case, rate: float, mtbf_s: float, runs: Sequence[_Run]) -> Result:
    useful = [run.shares["useful"] for run in runs]
    downtimes = [seconds for run in runs for seconds in run.downtimes_s]
    return Result(
        system=runs[0].system,
        num_nodes=case.num_nodes,
        rate=rate,
        mtbf_s=mtbf_s,
        useful=fmean(useful),
        useful_low=min(useful),
        useful_high=max(useful),
        shares={part: fmean(run.shares[part] for run in runs) for part in runs[0].shares},
        faults=fmean(run.faults for run in runs),
        recoveries=_mean([run.recoveries for run in runs]),
        from_checkpoint=_mean([run.from_checkpoint for run in runs]),
        given_up=_mean([run.given_up for run in runs]),
        downtime_s=median(downtimes) if downtimes else None,
    )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None

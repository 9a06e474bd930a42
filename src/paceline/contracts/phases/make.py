"""The sixteen phases of a plan, all or one, and the files they make.

Everything is worked out from the plan and the job: no network, no clock, the same again for the
same input. So a phase can be made alone, and a folder of phases can be gone on with: `phases.json`
keeps a digest of what each was made from.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.contracts.phases import (
    communicate,
    cost,
    launch,
    memory,
    resources,
    split,
    survive,
    train,
    validate,
)
from paceline.contracts.phases import document as final
from paceline.contracts.phases.case import Case, Gate, Goals, Phase
from paceline.contracts.phases.gates import find_gates
from paceline.contracts.phases.required import Replan, requirements_of, requirements_of_refused
from paceline.errors import PlanError
from paceline.job import Job, dump_job
from paceline.plan import Plan
from paceline.plan.outlook import outlook
from paceline.plan.text import plan_to_json
from paceline.render.text import to_json
from paceline.topology import find_cluster

PHASES: Mapping[int, tuple[str, Callable[[Case], dict[str, Any]]]] = {
    1: ("resource-assessment", resources.assess_resources),
    2: ("model-analysis", resources.analyse_model),
    3: ("parallelization-strategy", split.choose_strategy),
    4: ("data-distribution", split.distribute_data),
    5: ("communication-optimization", communicate.plan_communication),
    6: ("gradient-synchronization", communicate.synchronise_gradients),
    7: ("memory-optimization", memory.optimise_memory),
    8: ("fault-tolerance", survive.survive_faults),
    9: ("monitoring-plan", survive.plan_monitoring),
    10: ("training-configuration", train.configure_training),
    11: ("distributed-hyperparameters", train.choose_hyperparameters),
    12: ("performance-optimization", train.optimise_performance),
    13: ("launch-orchestration", launch.plan_launch),
    14: ("cost-estimation", cost.estimate_cost),
    15: ("validation-plan", validate.plan_validation),
    16: ("training-plan-documentation", final.document),
}
"""Number -> name, and what makes its output."""

EXPLAIN_A_REFUSAL = (1, 2, 7)
"""Phases that say why nothing fits and what would; the others would be about nothing."""

INDEX = "phases.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """What `paceline plan --phases` prints or writes."""

    phases: tuple[Phase, ...]
    gates: tuple[Gate, ...]

    files: Mapping[str, str]
    """Name -> whole text, of the phases that were made and of the documents."""

    kept: tuple[str, ...] = ()
    """Files that were made before from the same input, and are left as they are."""


def make_phases(
    job: Job,
    replan: Replan,
    *,
    goals: Goals | None = None,
    only: int | None = None,
    index: str | None = None,
    created: str | None = None,
) -> PhasePlan:
    """The phases of a job's plan with their gates and files.

    Args:
        replan: The planner: `partial(plan_job, facts=facts)`. It is asked again for changed jobs
            where nothing fits.
        goals: Budget and deadline; left out, the job's own.
        only: Number of the one phase that is wanted; None is all.
        index: Text of the folder's `phases.json`, where it is gone on with.
        created: When, as text, for the metadata; left out, the output depends on nothing but the
            input.

    Raises:
        PlanError: Nothing fits, and for another reason than memory: the batch does not divide.
        ValueError: There is no such phase.
    """
    if only is not None and only not in PHASES:
        raise ValueError(f"there is no phase {only}; they are 1 to {len(PHASES)}")
    asked = job.spec.plan
    goals = goals or Goals(budget_usd=asked.budget, deadline_s=asked.deadline)
    case = _case(job, replan, goals, created)
    gates = find_gates(case)
    numbers = tuple(PHASES) if case.feasible else EXPLAIN_A_REFUSAL
    phases = tuple(_phase(number, case) for number in numbers)
    if only is not None:
        phases = tuple(phase for phase in phases if phase.number == only)
        gates = tuple(gate for gate in gates if gate.phase == only or gate.stops)
    digest, made_before = _digest(case), _read_index(index)
    files: dict[str, str] = {}
    kept = []
    for phase in phases:
        if made_before.get(phase.file) == digest:
            kept.append(phase.file)
        else:
            files[phase.file] = to_json(phase.output)
    if only is None:
        files |= _documents(case, phases, gates)
    listed = {**made_before, **{phase.file: digest for phase in phases}}
    files[INDEX] = to_json(listed)
    return PhasePlan(phases=phases, gates=gates, files=files, kept=tuple(kept))


def _case(job: Job, replan: Replan, goals: Goals, created: str | None) -> Case:
    refused = available = None
    try:
        plan = replan(job)
        required = requirements_of(plan, job)
    except PlanError as error:
        refused = error.problems[0]
        if refused.code != "P001":
            raise
        available = find_cluster(job.spec.cluster, job).usable_bytes
        required, plan = requirements_of_refused(job, replan, available, error.needed_bytes)
    tried = () if refused is not None else _other_nodes(job)
    others = tuple(_on_other_nodes(job, replan, tried))
    return Case(
        job=job,
        plan=plan,
        view=outlook(plan, job),
        others=tuple((each, outlook(each, job)) for each in others),
        tried_nodes=tried,
        required=required,
        goals=goals,
        refused=refused,
        available_bytes=available,
        created=created,
    )


_QUARTERS = (1, 2, 3, 5, 6, 8, 12, 16)
"""Other numbers of nodes that are tried, in quarters of the job's: one search each."""


def _other_nodes(job: Job) -> tuple[int, ...]:
    """Numbers of nodes besides the job's, fewest first: one, and from a quarter to four times."""
    if find_cluster(job.spec.cluster, job).is_local:
        return ()
    nodes = job.spec.cluster.nodes
    around = {1, *(nodes * each // 4 for each in _QUARTERS if nodes * each % 4 == 0)}
    return tuple(sorted(around - {nodes}))


def _on_other_nodes(job: Job, replan: Replan, tried: tuple[int, ...]) -> Iterator[Plan]:
    """Plans for the job on other numbers of nodes, where something fits there."""
    for nodes in tried:
        cluster = replace(job.spec.cluster, nodes=nodes)
        with contextlib.suppress(PlanError):
            spec = replace(job.spec, cluster=cluster)
            yield replan(replace(job, spec=spec), advise=False)


def _phase(number: int, case: Case) -> Phase:
    name, make = PHASES[number]
    file = f"phase{number}-{name.removeprefix('distributed-')}.json"  # the process's own names
    return Phase(number=number, name=name, file=file, output=make(case))


def _documents(case: Case, phases: tuple[Phase, ...], gates: tuple[Gate, ...]) -> Mapping[str, str]:
    found = {
        "final-training-plan.json": to_json(final.final_object(case, phases, gates)),
        "final-training-plan.md": final.markdown(case, gates),
        "job.yaml": dump_job(case.job.spec),
    }
    if case.feasible:
        found["launch-script.sh"] = launch.launch_script(case)
        found["validate.sh"] = launch.validation_script(case)
        found["debug.sh"] = launch.debugging_script(case)
    return found


def _digest(case: Case) -> str:
    """Digest of everything that the phases are made from, but the day and how long the search
    took."""
    parts = (
        dump_job(case.job.spec),
        plan_to_json(case.plan).decode(),
        repr(case.goals),
        repr(case.view.assumptions),
        repr(case.view.costs),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_index(text: str | None) -> dict[str, str]:
    """What was made before; a file that is not ours counts as nothing made."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: digest for name, digest in found.items() if isinstance(digest, str)}

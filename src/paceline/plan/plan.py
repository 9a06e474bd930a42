"""Make the plan of a job: price every layout that is possible and choose one, with the case
against the rest.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil, inf

import numpy as np

from paceline.catalog import find_catalog_file, find_prices, load_catalog
from paceline.choices import Precision
from paceline.errors import JobError, PacelineError, PlanError, Problem
from paceline.estimate import Case, Estimate, price, price_one, stage_memory
from paceline.estimate.cost import RunCost, why_no_cost, why_none
from paceline.estimate.stages import stage_sizes
from paceline.job import Job
from paceline.parallel import Layout, Space
from paceline.parallel.engine_laws import all_reduced
from paceline.plan.caution import (
    assumed_efficiency,
    assumed_shape,
    cautions_of,
    units_of,
)
from paceline.plan.choose import choose
from paceline.plan.collective_share import collective_shares
from paceline.plan.decide import decide_intervals, decisions_of, length_of
from paceline.plan.decision import Decision, Plan, Point
from paceline.plan.host import check_building, host_bytes_of_one
from paceline.plan.infeasible import nothing_fits, offloads_of
from paceline.plan.interval import interval_caution, with_advised, with_spot
from paceline.plan.limits import limit_not_kept, limits_of
from paceline.plan.loss import check_loss_chunk, check_router_loss, router_loss_of
from paceline.plan.outlook import Outlook, needs_of, outlook
from paceline.plan.parallelize import parallelize_plan
from paceline.plan.reasons import rejected_of
from paceline.plan.recover import check_state
from paceline.plan.search import Found, fastest, search
from paceline.plan.search_inputs import (
    Asked,
    CanRun,
    case_of_asked,
    clashes,
    efficiencies_of,
    engine_of,
    space_of,
)
from paceline.profile import (
    DecoderShape,
    ModelProfile,
    ModuleFacts,
    check_positions,
    resolve_decoder,
    resolve_profile,
)
from paceline.topology import Cluster, find_cluster

_MOST_POINTS = 60
_NUM_PROVIDERS = 3
_MOST_SENT = 0.5
"""Share of a step, sent while nothing is computed, above which offloaded layouts are looked at too.
A choice: they need fewer ranks for a copy of the model, and with less than that sent the host's
link and memory, which are assumed, decide more than what is saved."""

_MOST_COUNTS = 48
"""Numbers of ranks that are tried for the objectives `ranks` and `cost`."""


def plan_job(
    job: Job,
    facts: ModuleFacts | None = None,
    *,
    must_fit: bool = True,
    advise: bool = True,
    can_run: CanRun | None = None,
) -> Plan:
    """The plan of a job, on this machine or on the cluster it declares.

    Args:
        job: As `load_job` read it.
        facts: What a helper process counted of the module, for a job with `model.factory`.
        must_fit: Where nothing fits, refuse; otherwise plan the leanest layout on all ranks.
        advise: Where nothing fits, search for changes that make it fit, which takes as long as
            dozens of plans.
        can_run: Asked of each other engine that would make it fit; without it none is named.

    Raises:
        JobError: The model, the engine or the cluster cannot be what the job says, or samples are
            longer than the model has positions.
        PlanError: Choices contradict each other, no layout fits in memory, or a node's memory does
            not hold the models that its ranks build.
    """
    cluster = find_cluster(job.spec.cluster, job)
    profile, decoder = resolve_profile(job, facts), resolve_decoder(job)
    JobError.raise_for(check_positions(job))
    is_ours = engine_of(job, cluster).name == "paceline"
    problems = list(check_building(facts, job, cluster)) if facts and is_ours else []
    if problems and must_fit:
        raise PlanError(*problems)
    return make_plan(
        job, cluster, profile, decoder, must_fit=must_fit, advise=advise, can_run=can_run
    )


def make_plan(
    job: Job,
    cluster: Cluster,
    profile: ModelProfile,
    decoder: DecoderShape | None = None,
    *,
    must_fit: bool = True,
    advise: bool = True,
    can_run: CanRun | None = None,
) -> Plan:
    """Choose the best layout that fits, and keep the case against the rest.

    Raises:
        PlanError: Choices contradict each other, or no layout fits in memory.
    """
    asked = Asked(
        job=job,
        cluster=cluster,
        profile=profile,
        decoder=decoder,
        catalog=load_catalog(find_catalog_file(job.folder, job.spec.cluster.catalog)),
        must_fit=must_fit,
        advises=advise,
        can_run=can_run,
    )
    objective = job.spec.plan.objective
    if objective == "time" or cluster.is_local or not must_fit:
        return _plan_on(asked)
    return _on_fewer_ranks(asked)


def _plan_on(asked: Asked) -> Plan:
    """The plan on all ranks of the cluster."""
    job, cluster, wanted = asked.job, asked.cluster, asked.job.spec.plan
    space = space_of(job, cluster, asked.profile)
    PlanError.raise_for(clashes(job, cluster, space))
    case = case_of_asked(asked)
    limit = int(cluster.usable_bytes * (1 - wanted.head_room))
    space, found = _search(job, space, case, limit)
    choice = choose(found, case, limit_bytes=limit, margin=wanted.simpler_margin)
    if choice is None and len(found.leanest) and not asked.must_fit:
        least = ceil(found.leanest.memory_bytes.min())
        found = search(space, case, limit_bytes=least, margin=wanted.simpler_margin)
        choice = choose(found, case, limit_bytes=least, margin=wanted.simpler_margin)
    if choice is None:
        raise nothing_fits(asked, case, found, limit, plan=_planned if asked.advises else None)
    PlanError.raise_for(
        [*check_loss_chunk(job, choice.layout), *check_router_loss(job, choice.layout)]
    )
    checkpoint_every, evaluate_every = decide_intervals(job.spec)
    precision: Precision = case.precision  # type: ignore[assignment]
    plan = Plan(
        cluster=cluster,
        profile=asked.profile,
        decoder=asked.decoder,
        layout=choice.layout,
        estimate=choice.estimate,
        precision=precision,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        decisions=decisions_of(job, cluster, asked.decoder, asked.profile, choice),
        rejected=rejected_of(choice),
        length=length_of(job),
        engine=case.engine.name,
        engine_version=case.engine.version,
        is_compiled=job.spec.train.compile,
        states=job.spec.train.states,
        mlx_backend=job.spec.cluster.mlx_backend,
        attention=job.spec.train.attention,
        fp8_recipe=job.spec.train.fp8_recipe,
        async_tensor=job.spec.train.async_tensor,
        token_dispatcher=job.spec.train.token_dispatcher,
        async_expert=job.spec.train.async_expert,
        optimizer_in_backward=job.spec.train.optimizer_in_backward,
        optimizer=case.optimizer,
        loss_chunk=case.loss_chunk,
        measured_rates={name: dict(row) for name, row in asked.catalog.efficiencies.items()},
        router_loss=router_loss_of(job),
        objective=wanted.objective,
        head_room=wanted.head_room,
        host_bytes=host_bytes_of_one(choice.layout, case),
        space_size=found.num_layouts,
        num_fitting=found.num_fitting,
        search_s=found.search_s,
        stages=tuple(stage_memory(choice.layout, case)) if choice.layout.pipeline > 1 else (),
        stage_blocks=stage_sizes(choice.layout, case),
        cautions=(
            *cautions_of(
                job,
                space,
                case,
                choice.layout,
                choice.estimate,
                limit_bytes=limit,
                takes=partial(_takes, asked),
            ),
            *collective_shares(asked, case, choice.layout, choice.estimate, limit_bytes=limit),
            *assumed_shape(job, asked.catalog, cluster, choice.layout),
            *assumed_efficiency(efficiencies_of(asked), case),
        ),
        units=units_of(case, choice.layout),
        parallelize=parallelize_plan(job, choice.layout, asked.profile),
    )
    return _with_outlook(plan, asked, found)


def _search(job: Job, space: Space, case: Case, limit_bytes: float) -> tuple[Space, Found]:
    """Every layout that the job leaves open, and what was found there. Offloaded ones are among
    them where none fits without, or the fastest sends for more than half of its step. Where
    the job sets what only an all-reduce uses, those that have one come first."""
    margin = job.spec.plan.simpler_margin
    whole = replace(space, fixed=all_reduced(job.spec.train, space.fixed, space.abilities))
    if whole.fixed != space.fixed:
        found = search(whole, case, limit_bytes=limit_bytes, margin=margin)
        if found.near is not None:
            return whole, found
    found = search(space, case, limit_bytes=limit_bytes, margin=margin)
    offloads = offloads_of(job, case.cluster)
    if job.spec.layout.offload != "auto" or not set(offloads) & set(space.abilities.offloads):
        return space, found
    alone = None if found.near is None else found.near.fastest()
    if alone is not None and _sent_share(price_one(alone, case)) <= _MOST_SENT:
        return space, found
    wider = replace(space, offloads=("none", *offloads))
    found = search(wider, case, limit_bytes=limit_bytes, margin=margin)
    return wider, replace(found, fastest_alone=alone)


def _planned(asked: Asked) -> Plan | None:
    """The plan on all ranks; None where the job is refused."""
    try:
        return _plan_on(replace(asked, advises=False))
    except PacelineError:
        return None


def _takes(asked: Asked, engine: str) -> bool:
    """Whether another engine, with or without a release behind it, plans this very job, and its
    files are written."""
    name, _, version = engine.partition(" ")
    spec = replace(asked.job.spec, engine=name, engine_version=version, engine_path=None)
    job = replace(asked.job, spec=spec)
    plan = _planned(replace(asked, job=job))
    return plan is not None and (asked.can_run is None or asked.can_run(plan, job))


def _sent_share(estimate: Estimate) -> float:
    """Share of a step that is communication which nothing hides; 0 where its time is unknown."""
    sent = sum(estimate.terms.get(name, 0.0) for name in ("tensor", "context", "expert", "data"))
    return sent / estimate.step_s if estimate.step_s else 0.0


def fastest_layouts(
    job: Job, facts: ModuleFacts | None, count: int
) -> list[tuple[Layout, Estimate]]:
    """The fastest layouts of a job that fit, however alike they are."""
    cluster = find_cluster(job.spec.cluster, job)
    asked = Asked(
        job=job,
        cluster=cluster,
        profile=resolve_profile(job, facts),
        decoder=None,
        catalog=load_catalog(find_catalog_file(job.folder, job.spec.cluster.catalog)),
    )
    space = space_of(job, cluster, asked.profile)
    PlanError.raise_for(clashes(job, cluster, space))
    case, limit = case_of_asked(asked), cluster.usable_bytes * (1 - job.spec.plan.head_room)
    space, _ = _search(job, space, case, limit)
    return fastest(space, case, limit_bytes=limit, count=count)


def is_deterministic(job: Job, plan: Plan) -> bool:
    """Whether repeated steps give the same bits: as asked; left open, on CPUs alone."""
    asked = job.spec.train.deterministic
    return plan.cluster.accelerator == "cpu" if asked == "auto" else asked


def _with_outlook(plan: Plan, asked: Asked, found: Found) -> Plan:
    """The plan with what its run costs and takes, and with its limits."""
    wanted, cluster = asked.job.spec.plan, asked.cluster
    prices = find_prices(cluster.accelerator, prices=asked.catalog.prices)
    view = outlook(plan, asked.job, prices=prices)
    advised = with_advised(plan, asked.job, view)
    if advised is not plan:
        plan, view = advised, outlook(advised, asked.job, prices=prices)
    PlanError.raise_for(check_state(plan, asked.job, view.state))
    costs = [
        cost
        for cost in view.costs
        if (cost.way == "spot") == wanted.spot
        and (wanted.provider is None or cost.provider.lower() == wanted.provider.lower())
    ]
    cost = costs[0] if costs else None
    if wanted.provider is not None and cost is None:
        why = why_none(wanted.provider, prices, needs_of(plan, view.state))
        raise PlanError(_no_such_provider(asked, view, why))
    wall_s = view.train_s if cluster.is_local else view.wall_s
    good = None if cluster.is_local else view.goodput
    if cost is not None and cost.way == "spot":
        wall_s = cost.hours * 3600
        good = view.failures.goodput(cluster.num_ranks, cost.num_instances)
        plan = with_spot(plan, asked.job, good)
        view = replace(view, state=outlook(plan, asked.job, prices=()).state)
    usd = None if cost is None else cost.usd
    no_cost = None
    if cost is None and not cluster.is_local:
        no_cost = why_no_cost(cluster.accelerator, prices, view.train_s)
        if view.costs:
            has, lacks = ("on demand", "spot") if wanted.spot else ("spot", "on demand")
            no_cost = f"machines that can run it have a price {has} and none {lacks}"
    plan = replace(
        plan,
        cost=cost,
        why_no_cost=no_cost,
        costs=_cheapest_providers(view),
        goodput=good,
        state=view.state,
        wall_s=wall_s,
        pareto=tuple(_points(found, plan, case_of_asked(asked), usd)),
        cautions=(*plan.cautions, *interval_caution(plan, asked.job, view)),
    )
    return replace(plan, limits=tuple(limits_of(asked.job, plan)))


def _cheapest_providers(view: Outlook) -> tuple[RunCost, ...]:
    """The three cheapest on demand and the three cheapest spot, the cheapest first."""
    ways = ("on demand", "spot")
    kinds = [[cost for cost in view.costs if cost.way == way][:_NUM_PROVIDERS] for way in ways]
    return tuple(sorted((cost for kind in kinds for cost in kind), key=lambda cost: cost.usd))


def _no_such_provider(asked: Asked, view: Outlook, why: str | None) -> Problem:
    wanted = asked.job.spec.plan
    way = "spot" if wanted.spot else "on demand"
    known = sorted({cost.provider for cost in view.costs if cost.way == way})
    return Problem(
        code="P003",
        what=f"no price of {asked.cluster.accelerator} {way} at {wanted.provider} is known"
        if why is None
        else f"{wanted.provider} cannot run the plan: {why}",
        where=asked.job.where("plan.provider"),
        fix=f"name one of {', '.join(known)}"
        if known
        else "add it to a catalog file of your own: `paceline catalog --write`",
    )


def _points(found: Found, plan: Plan, case: Case, usd: float | None) -> Iterator[Point]:
    """The front, thinned out evenly where it is long."""
    front, chosen_s = found.front, plan.estimate.step_s
    if front is None:
        return
    places = np.arange(0, len(front), max(1, -(-len(front) // _MOST_POINTS)))
    steps = np.broadcast_to(price(front.layouts.take(places), case).step_s, len(places))
    least = inf
    # The front is of the slow ends; of the estimates themselves some points may be beaten.
    for seconds, index in sorted(zip(steps.tolist(), places.tolist(), strict=True)):
        if front.memory_bytes[index] >= least:
            continue
        least = float(front.memory_bytes[index])
        step_s = seconds if chosen_s else None
        yield Point(
            layout=front.layouts.row(index),
            step_s=step_s,
            memory_bytes=round(float(front.memory_bytes[index])),
            usd=usd * step_s / chosen_s if usd and step_s and chosen_s else None,
        )


def _on_fewer_ranks(asked: Asked) -> Plan:
    """The fewest ranks that fit and keep every limit, or the cheapest run."""
    job, wanted = asked.job, asked.job.spec.plan
    best: Plan | None = None
    refused: PlanError | None = None
    for cluster in _smaller_clusters(asked):
        try:
            advises = asked.advises and cluster.num_ranks == _most_ranks(asked)
            plan = _plan_on(replace(asked, cluster=cluster, advises=advises))
        except PlanError as error:
            refused = error
            continue
        if not all(limit.is_kept in (True, None) for limit in plan.limits):
            refused = PlanError(limit_not_kept(job, plan))
            continue
        if wanted.objective == "ranks":
            best = plan
            break
        if best is None or _usd(plan) < _usd(best):
            best = plan
    if best is None:
        if refused is not None:
            raise refused
        return _plan_on(asked)
    what = (
        "the fewest that fit" + (" and keep the limits" if len(best.limits) > 1 else "")
        if wanted.objective == "ranks"
        else "the cheapest run of those tried"
    )
    number = Decision(
        field="cluster",
        value=f"{best.cluster.num_ranks} of at most {_most_ranks(asked)} ranks",
        reason=f"plan.objective is {wanted.objective}: {what}",
    )
    return replace(best, decisions=(number, *best.decisions))


def _usd(plan: Plan) -> float:
    if plan.cost is not None:
        return plan.cost.usd
    # Without a price every accelerator-hour costs the same.
    return inf if plan.wall_s is None else plan.wall_s * plan.cluster.num_ranks


def _most_ranks(asked: Asked) -> int:
    return asked.job.spec.plan.max_ranks or asked.cluster.num_ranks


def _smaller_clusters(asked: Asked) -> Iterator[Cluster]:
    """Clusters of the same accelerators in other numbers, fewest first: parts of one node, then
    whole nodes.

    All numbers of nodes up to 16, then those whose only prime factors are 2, 3 and 5, and the most.
    """
    job, most = asked.job, _most_ranks(asked)
    per_node = asked.cluster.ranks_per_node
    for ranks in range(1, min(per_node, most + 1)):
        if per_node % ranks == 0:
            yield _cluster_of(job, 1, ranks)
    nodes = max(most // per_node, 0)
    counts = [n for n in range(1, nodes + 1) if n <= 16 or n == nodes or _is_smooth(n)]
    while len(counts) > _MOST_COUNTS:
        counts = [*counts[:16], *counts[16:-1:2], counts[-1]]
    for count in counts:
        yield _cluster_of(job, count, per_node)


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def _cluster_of(job: Job, nodes: int, per_node: int) -> Cluster:
    spec = replace(job.spec.cluster, nodes=nodes, per_node=per_node)
    return find_cluster(spec, job)

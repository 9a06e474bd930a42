"""What a plan was priced with, again: for the same layout on fewer ranks, over another network, or
with another recomputation."""

from paceline.catalog.efficiencies import load_efficiencies, with_measured
from paceline.catalog.engines import as_asked, find_engine
from paceline.estimate import Case, case_of
from paceline.parallel.abilities import planned_engine
from paceline.plan.decision import Plan
from paceline.topology import Cluster


def case_of_plan(plan: Plan, cluster: Cluster | None = None) -> Case:
    """The case of a plan: its model, engine, precision, optimizer and constants.

    Args:
        plan: As made, or as read from `plan.json`.
        cluster: Another one than the plan's.
    """
    engine = planned_engine(find_engine(plan.engine, plan.engine_version))
    engine = as_asked(
        engine,
        states=plan.states,
        attention=plan.attention,
        fp8_recipe=plan.fp8_recipe,
        async_tensor=plan.async_tensor,
        token_dispatcher=plan.token_dispatcher,
        async_expert=plan.async_expert,
        optimizer_in_backward=plan.optimizer_in_backward,
        is_compiled=plan.is_compiled,
    )
    cluster, shipped = cluster or plan.cluster, load_efficiencies()
    return case_of(
        plan.profile,
        cluster,
        precision=plan.precision,
        optimizer=plan.optimizer,
        engine=engine,
        efficiencies=with_measured(shipped, plan.measured_rates, accelerator=cluster.accelerator),
        loss_chunk=plan.loss_chunk,
    )

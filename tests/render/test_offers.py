"""What `paceline cost` offers, `paceline render` writes files for."""

import pytest
from tests.plan.scene import JOB, job_of

from paceline.catalog import find_prices, load_prices, load_providers
from paceline.errors import JobError
from paceline.job import Job
from paceline.plan import Plan, plan_job
from paceline.plan.bill import bill_of_plan
from paceline.render import render_job
from paceline.render.engine import RenderError

RENTED = {name for name, row in load_providers().items() if row.render == name}
KINDS = sorted(
    {
        (price.accelerator, price.num_accelerators)
        for price in load_prices()
        if price.provider in RENTED and price.accelerator and price.num_accelerators in (1, 4, 8)
    }
)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("accelerator", "per_node"), KINDS)
def test_s0_14_a_provider_is_offered_if_render_writes_files_for_it(
    accelerator: str, per_node: int, nodes: int
):
    sets = [
        f"cluster.accelerator={accelerator}",
        f"cluster.nodes={nodes}",
        f"cluster.per_node={per_node}",
        "model={decoder: {layers: 2, hidden: 64, heads: 4}}",
        "train.precision=fp32",
    ]
    job = job_of(JOB, *sets)
    plan = plan_job(job)
    bill = bill_of_plan(plan, job, find_prices(accelerator))
    priced = {row.provider for row in find_prices(accelerator)}
    for provider in RENTED:
        offered = provider in {cost.provider for cost in bill.costs if not cost.is_by_hand}
        assert offered is (refused(provider, plan, job) is None) or provider not in priced, provider
        if nodes > 1 and provider in priced:
            assert dict(bill.refused)[provider] == load_providers()[provider].one_machine


def refused(provider: str, plan: Plan, job: Job) -> str | None:
    try:
        render_job(provider, plan, job)
    except (RenderError, JobError) as error:
        return str(error)
    return None

"""A plan in the words of the two older JSON contracts (`reading/` reads them)."""

from collections.abc import Mapping
from typing import Any

from paceline.contracts.reading import ContractKind
from paceline.contracts.writing.coordinator import training_plan
from paceline.contracts.writing.engineer import output_of
from paceline.job import Job
from paceline.plan.decision import Plan
from paceline.plan.outlook import outlook

__all__ = ["format_contract", "output_of", "training_plan"]


def format_contract(
    plan: Plan,
    job: Job,
    kind: ContractKind,
    stated: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The plan as JSON values in a contract's words.

    Args:
        plan: As `plan_job` made it.
        kind: `002`, the engineer's output; or `004`, the coordinator's training plan, for CUDA or
            for MLX by the cluster's accelerator.
        stated: The training plan (004) that the job was made of, if it was.
    """
    view = outlook(plan, job)
    if kind == "002":
        return output_of(plan, job, view)
    return training_plan(plan, job, view, stated or {})

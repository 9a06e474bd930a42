"""What to choose: the plan of a job, and why not the others."""

from paceline.plan.decision import Decision, Plan, Rejected
from paceline.plan.plan import is_deterministic, make_plan, plan_job
from paceline.plan.text import plan_from_json, plan_to_json

__all__ = [
    "Decision",
    "Plan",
    "Rejected",
    "is_deterministic",
    "make_plan",
    "plan_from_json",
    "plan_job",
    "plan_to_json",
]

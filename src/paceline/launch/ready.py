"""Whether a job can be run, before anything is written or started."""

import importlib.util
import sys
from collections.abc import Iterator

from paceline.errors import Problem
from paceline.launch.places import attached, find_place
from paceline.parallel import reasons_ours_cannot
from paceline.plan import Plan
from paceline.profile import check_runnable, needs_transformers
from paceline.spec import Job


def check_can_run(job: Job, plan: Plan, *, place: str = "local") -> Iterator[Problem]:
    """What keeps the job from running at a place, before anything is started.

    What must be installed is asked where it runs: a queue's machines are others than this one.
    """
    if find_place(place).kind == "attached":
        yield from _check_installed(job)
        yield from check_runs_here(job, plan)
        yield from attached(place).check(job, plan)
    else:
        yield from check_runnable(job)
        yield from check_runs_here(job, plan)


def _check_installed(job: Job) -> Iterator[Problem]:
    if importlib.util.find_spec("torch") is None:
        yield Problem(
            code="R010",
            what="training needs PyTorch, which is not installed",
            where=sys.prefix,
            fix="pip install torch numpy",
        )
    if job.spec.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Problem(
            code="R010",
            what="TensorBoard was asked for, which is not installed",
            where=job.where("metrics.tensorboard"),
            fix="pip install tensorboard, or set metrics.tensorboard to false",
        )
    against = list(check_runnable(job))
    yield from against
    of_transformers = not against and job.spec.program is None and needs_transformers(job)
    if of_transformers and importlib.util.find_spec("transformers") is None:
        yield Problem(
            code="R010",
            what="this model is built by transformers, which is not installed",
            where=job.where("model"),
            fix="pip install transformers",
        )


def check_runs_here(job: Job, plan: Plan) -> Iterator[Problem]:
    """What was planned and Paceline's own runtime cannot do yet."""
    lacking = list(reasons_ours_cannot(plan.layout))
    if plan.engine != "paceline":
        lacking.append(f"engine {plan.engine}")
    if lacking:
        yield Problem(
            code="R015",
            what=f"`paceline run` cannot do this plan yet: {', '.join(lacking)}",
            where=job.where("layout"),
            fix="leave what is named at auto, and engine out; `paceline plan` works for all of it",
        )

"""Whether a job can be run, before anything is written or started."""

from collections.abc import Iterator

from paceline import render
from paceline.errors import Problem
from paceline.job import Job
from paceline.job.data_rules import check_names_data
from paceline.job.packages import check_package
from paceline.launch.engine_run import check as check_engine
from paceline.launch.notify import check_variables
from paceline.launch.places import attached, find_place
from paceline.launch.plannable import check_files, check_ours, check_reduction
from paceline.launch.sinks.run_sinks import check_sinks
from paceline.parallel import reasons_ours_cannot
from paceline.parallel.abilities import check_accelerator
from paceline.plan import Plan
from paceline.profile import check_runnable, needs_transformers
from paceline.record.remote import check_remote


def check_can_run(job: Job, plan: Plan, *, place: str = "local") -> Iterator[Problem]:
    """What keeps the job from running at a place, before anything is started.

    What must be installed is asked where it runs: a queue's machines are others than this one.
    """
    if plan.engine != "paceline":
        yield from check_engine(plan.engine, job, plan, place=place)
        own = place == "kubernetes" and job.spec.kubernetes.script is not None
        yield from render.check_files(plan, job, own_program=own)
        if place not in ("local", "kubernetes") and find_place(place).kind == "attached":
            yield from attached(place).check(job, plan)
        return
    if (problem := check_accelerator("paceline", plan.cluster)) is not None:
        yield problem
    yield from check_names_data(job)
    yield from check_ours(job)
    yield from check_reduction(job, plan)
    if find_place(place).kind == "attached":
        yield from _check_installed(job)
        yield from check_runs_here(job, plan)
        yield from attached(place).check(job, plan)
    else:
        yield from check_runnable(job)
        yield from check_runs_here(job, plan)
    yield from _check_evaluated(job, place)
    yield from check_files(job, evaluated=find_place(place).has_our_files)


def _check_installed(job: Job) -> Iterator[Problem]:
    yield from check_package("torch", "training needs PyTorch")
    yield from check_variables(job.spec.alerts)
    yield from check_sinks(job.spec.metrics, job.where)
    if job.spec.checkpoint.copy_to is not None:
        yield from check_remote(job.spec.checkpoint.copy_to, job.where("checkpoint.copy_to"))
    against = list(check_runnable(job))
    yield from against
    if not against and job.spec.program is None and needs_transformers(job):
        need = "this model is built by transformers"
        yield from check_package("transformers", need, where=job.where("model"))


def _check_evaluated(job: Job, place: str) -> Iterator[Problem]:
    """Whether prompts and tasks can be answered at the end, where the job runs."""
    evaluate = job.spec.evaluate
    if evaluate.prompts is not None:
        fix = "leave it out, and generate from what `paceline export` writes"
        yield from _check_asked(job, place, "prompts", ["transformers"], fix)
    if evaluate.tasks:
        fix = "leave it out, and evaluate what `paceline export` writes with lm_eval"
        yield from _check_asked(job, place, "tasks", ["transformers", "lm_eval"], fix)


def _check_asked(
    job: Job, place: str, name: str, packages: list[str], fix: str
) -> Iterator[Problem]:
    where = job.where(f"evaluate.{name}")
    if not find_place(place).has_our_files:
        yield Problem(
            code="W027",
            what=f"evaluate.{name} is read from files of this machine, and at "
            f"{find_place(place).title} none is read",
            where=where,
            fix=fix,
        )
    elif find_place(place).kind == "attached":
        for package in packages:
            yield from check_package(
                package, f"evaluate.{name} is answered by {package}", where=where
            )


def check_runs_here(job: Job, plan: Plan) -> Iterator[Problem]:
    """What was planned and Paceline's own runtime cannot do yet."""
    lacking = list(reasons_ours_cannot(plan.layout))
    if lacking:
        yield Problem(
            code="R015",
            what=f"`paceline run` cannot do this plan yet: {', '.join(lacking)}",
            where=job.where("layout"),
            fix="leave what is named at auto, or name an engine that has it; `paceline plan` works "
            "for all of it",
        )

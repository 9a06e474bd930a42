"""What `paceline run` refuses of a job file and the files that it names, whatever the machine:
`plan`, `render` and `prove` refuse it too, or print it as a note where a plan is of use all the
same. Leaves out what is to be installed, and later rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.control.alerts import check_names
from paceline.errors import JobError, PacelineError, Problem
from paceline.job import Job, load_job, load_script
from paceline.job.data_rules import is_prepared
from paceline.job.evaluate_rules import check_measured
from paceline.job.length_rules import uncounted
from paceline.job.pretrained import find_pretrained, loads_weights
from paceline.job.prompts import read_prompts
from paceline.job.safetensors import stored_tensors
from paceline.job.tasks import read_tasks
from paceline.job.yaml_text import where_in
from paceline.launch.engine_run import check_anywhere
from paceline.launch.factory import measure_factory
from paceline.parallel.layout_laws import check_all_reduce, check_compression
from paceline.plan import Plan, plan_job
from paceline.profile import ModuleFacts, check_asked, check_model, resolve_decoder
from paceline.profile.fitting import check_decoder_tensors
from paceline.render import RenderError, check_release, writes
from paceline.render import check_files as check_written
from paceline.topology import find_cluster

ABSENT = ("D001", "D010")
"""Codes of data and tokenizers that are not here: a cluster that the job declares may have them."""

_NOT_INSTALLED = "R010"


def check_plannable(job: Job) -> list[Problem]:
    """What `paceline run` could not do, and a plan is of use all the same: the model is for another
    engine, the data are not on this machine, the first rows look broken. A job that names no data
    is planned: only a run needs them.

    Raises:
        JobError: Everything else that a run refuses of the job file and the files that it names.
    """
    if job.spec.engine != "paceline":
        return []
    refused, named = [*check_asked(job), *check_files(job)], [*check_model(job)]
    found, doubts = _look_at_data(job)
    absent = [each for each in found if each.code in ABSENT]
    if absent and not find_cluster(job.spec.cluster, job).is_local:
        named += absent
    refused += [each for each in found if each not in named and each not in refused]
    JobError.raise_for(refused)
    return [*named, *doubts]


def check_ours(job: Job) -> Iterator[Problem]:
    """What only another engine reads, and a plan for ours may keep."""
    if job.spec.data.corpus == "mock":
        yield Problem(
            code="J007",
            what="Paceline's own runtime cannot generate mock samples (data.corpus mock)",
            where=job.where("data.corpus"),
            fix="set data.path to your own files before the run; this plan needs no data",
        )
    if job.spec.engine_path is not None:
        yield Problem(
            code="J007",
            what="engine_path is read for the engine megatron alone",
            where=job.where("engine_path"),
            fix="leave it out, or set engine: megatron",
        )


def check_reduction(job: Job, plan: Plan) -> Iterator[Problem]:
    """What the job asks of the all-reduce of whole gradients and the planned layout has no use for,
    as the ranks would refuse it. Leaves out other engines: their files list it."""
    if plan.engine != "paceline":
        return
    train, layout = job.spec.train, plan.layout
    is_plain = layout.tensor == layout.pipeline == layout.expert == 1
    for problem in (
        *check_compression(layout, train.gradient_compression, plan.precision, is_plain=is_plain),
        *check_all_reduce(
            layout,
            is_plain=is_plain,
            bucket_bytes=None if train.bucket == "auto" else train.bucket,
            static_graph=train.static_graph,
        ),
    ):
        problem = replace(problem, where=job.where(problem.where))
        if layout.keeps_shards and job.spec.layout.sharding == "auto":  # those with one come first
            problem = replace(
                problem,
                what=f"{problem.what}; no layout with an all-reduce fits in memory",
                fix=problem.fix.replace("set layout.sharding to none, or ", ""),
            )
        yield problem


def plan_of_file(path: Path) -> Plan | PacelineError | str | None:
    """What `paceline plan` makes of a job file, or refuses; data are not looked at, and no code of
    the job is run. Of a job for CPUs the refusals alone: how fast this machine is, and how much
    memory it has, says nothing of the next. A reason, where a job is not planned; None of a program
    that is only started."""
    try:
        if load_script(path) is not None:
            return None
        job = load_job(path, count=uncounted)
        spec = job.spec
        if spec.cluster.accelerator == "auto":
            return "cluster.accelerator auto is the machine that it runs on"
        if spec.model.factory is not None:
            return "only the code of model.factory can count its model"
        is_cpu = spec.cluster.accelerator == "cpu"
        plan = plan_job(job, must_fit=not is_cpu, advise=not is_cpu)
        check_planned(job, plan)
    except PacelineError as error:
        return error
    return plan if not is_cpu else None


_NOTED = ("R015", "H025", "J007")
"""Codes of an engine's run that a plan does without: a launcher, what its program reads, and what
another engine's does."""


def check_planned(job: Job, plan: Plan) -> list[Problem]:
    """What `paceline run` refuses of a plan at every place, and your own program, or a line
    more or less in the job, would do.

    Raises:
        RenderError: `H002`, the engine's files cannot be written, with your own program too.
        JobError: A path in the job cannot be written into the files.
    """
    if plan.engine == "paceline":
        JobError.raise_for(check_reduction(job, plan))
        return [*check_ours(job)]
    if check_release(plan) is not None:  # a warning of the plan
        return []
    RenderError.raise_for(check_written(plan, job))
    found = list(check_anywhere(plan.engine, job))
    JobError.raise_for(each for each in found if each.code not in _NOTED)
    return [*found, *check_written(plan, job, own_program=False)]


def can_run(plan: Plan, job: Job) -> bool:
    """Whether `paceline plan` prints a plan of the job, rather than refuse the job or its files."""
    try:
        check_plannable(job)
    except PacelineError:
        return False
    if plan.engine == "paceline":
        return True
    return writes(plan, job) and not any(
        each.code not in _NOTED for each in check_anywhere(plan.engine, job)
    )


def planned(
    job: Job, facts: ModuleFacts | None = None, *, must_fit: bool = True, advise: bool = True
) -> Plan:
    """The plan of a job as every verb makes it: where nothing fits, engines that do are named.

    Args:
        job: As read.
        facts: Of its own module, counted before; left out, they are counted here.
        must_fit: As `plan_job` takes it.
        advise: As `plan_job` takes it.

    Raises:
        PacelineError: As `plan_job` raises it, or the module cannot be counted.
    """
    if facts is None:
        facts = measure_factory(job)
    return plan_job(job, facts, must_fit=must_fit, advise=advise, can_run=can_run)


def _look_at_data(job: Job) -> tuple[list[Problem], list[Problem]]:
    """What is refused of the data, and what may be wrong with them."""
    if not is_prepared(job) and job.spec.data.path is None:
        return [], []
    from paceline.prepare import check_data  # no plan on bytes of a corpus needs it

    try:
        return [], check_data(job)
    except JobError as error:
        return [each for each in error.problems if each.code != _NOT_INSTALLED], []


def check_files(job: Job, *, evaluated: bool = True) -> Iterator[Problem]:
    """Whether evaluations are made, alerts name metrics that there are, and files besides the data
    can be used: trained weights, and, where they are `evaluated`, prompts and tasks."""
    yield from check_measured(job.spec, job.where)
    where, its_own = where_in(job.lines, job.source, "alerts"), job.spec.program is not None
    yield from check_names(job.spec.alerts, where, logs_its_own=its_own)
    for check in (_check_tensors, *((read_prompts, read_tasks) if evaluated else ())):
        try:
            check(job)
        except JobError as error:
            yield from error.problems


def _check_tensors(job: Job) -> None:
    """
    Raises:
        JobError: `M012`, a file of trained weights is damaged; `M013`, they are not those of the
            built-in decoder. Models of transformers are compared by the ranks.
    """
    found = find_pretrained(job) if loads_weights(job) and job.spec.program is None else None
    if found is None:
        return
    stored, shape = stored_tensors(found.weights, where=found.where), resolve_decoder(job)
    if shape is not None:
        where = f"{found.where}: {found.folder}"
        JobError.raise_for(check_decoder_tensors(shape, stored, where=where))

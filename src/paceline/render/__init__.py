"""Hand over: a plan becomes the files of the engine that people already have. Pure: no files are
written here, no engine is imported.

One module per engine, listed in `ENGINES`; each has `render(plan, job)` and `gaps(plan, job)`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from paceline.catalog.load import read_rows
from paceline.errors import JobError, PacelineError, Problem, did_you_mean
from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES, written_for
from paceline.job.secrets import find_in_lines
from paceline.parallel.abilities import check_has_files
from paceline.plan import Plan
from paceline.plan.plan import make_plan
from paceline.profile import (
    DecoderShape,
    ModelProfile,
    ModuleFacts,
    resolve_decoder,
    resolve_profile,
)
from paceline.render.carried import left_out
from paceline.render.engine import ANY_MODEL, Engine, EngineModule, Files, Gap, RenderError
from paceline.render.example import OWN_SCRIPT, SETTINGS, needs_own_program, without_own_program
from paceline.render.model import config_of
from paceline.topology import Cluster, find_cluster

__all__ = [
    "ENGINES",
    "Engine",
    "Files",
    "Gap",
    "RenderError",
    "Rendered",
    "check_files",
    "check_model",
    "check_release",
    "find",
    "for_engine",
    "leaves_out",
    "render_job",
    "renderer_of",
    "writes",
]

_ELSEWHERE = {"lambda": "lambda_cloud"}
"""Engines whose module has another name: `lambda` is a word of Python."""


def _module(name: str) -> str:
    return f"{__name__}.{_ELSEWHERE.get(name, name.replace('-', '_'))}"


ENGINES: Mapping[str, Engine] = {
    name: row if row.versions else replace(row, versions=written_for(name))
    for name, row in read_rows("renderers.toml", Engine, key="module", named=_module).items()
}
"""Name on the command line -> the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One plan for one engine."""

    files: Files
    gaps: tuple[Gap, ...]
    """What they leave out, each with the nearest that they say instead."""


def find(
    name: str, cluster: Cluster | None = None, takes: Callable[[str], bool] | None = None
) -> Engine:
    """The engine of that name, or of a catalog engine whose files it writes.

    Args:
        name: Of either.
        cluster: Where an engine that is named instead trains.
        takes: Whether it takes the job.

    Raises:
        JobError: `H001`, naming the nearest; `R015`, it is estimated, and no files are written.
    """
    if is_only_estimated(name):
        JobError.raise_for(filter(None, [check_has_files(name, "", cluster, takes)]))
    engine = ENGINES.get(_RENDERERS.get(name, name))
    if engine is None:
        raise JobError.of(
            code="H001",
            what=f"there is no engine {name!r}",
            where="--for",
            fix=did_you_mean(name, ENGINES) or f"one of {', '.join(ENGINES)}",
        )
    return engine


def is_only_estimated(name: str) -> bool:
    """Whether the catalog has an engine that no files are written for."""
    return name not in _RENDERERS and name in ENGINE_NAMES and name not in ENGINES


def render_job(name: str, plan: Plan, job: Job, *, own_program: bool = True) -> Rendered:
    """The files that hand a plan to an engine.

    Args:
        name: One of `ENGINES`.
        plan: What `plan_job` chose for the job.
        job: The job, for what a plan does not hold: data, schedule, names.
        own_program: Whether somebody may still put a program of their own in the example's place.
            Where not, the files run as they are: what only such a program could do is refused.

    Raises:
        JobError: `H001`, there is no such engine; `R015`, the plan is for a release of it that no
            files are written for; `J013`, a file would hold a secret; or the job cannot be written
            into its files.
        RenderError: `H002`, the engine cannot express the plan; one problem for each part.
    """

    def takes(other: str) -> bool:
        return _refused_with(other, job, plan.profile, plan.decoder) is None

    module = cast(EngineModule, importlib.import_module(find(name, plan.cluster, takes).module))
    if renderer_of(plan.engine) == name:
        JobError.raise_for(filter(None, [check_release(plan)]))
    gaps = _gaps(module, plan, job, own_program=own_program)
    # Kubeflow has a runtime of its own for some engines, which a job asks for by name.
    if not getattr(module, "starts_engine", _never)(job):
        gaps = _beside_engine(name, plan, gaps)
    RenderError.raise_for(_refusals(name, gaps, job, plan.profile, plan.decoder))
    files = module.render(plan, job)
    JobError.raise_for(_secrets_in(files))
    return Rendered(files=files, gaps=(*gaps, *_without_data(files, job)))


def _never(job: Job) -> bool:
    return False


def _beside_engine(name: str, plan: Plan, gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """What files of a place or a launcher lack of a plan for an engine that they do not start: that
    engine comes first, and is the fix of what they cannot split as it does."""
    if plan.engine == "paceline" or name in (*ENGINE_NAMES, renderer_of(plan.engine)):
        return gaps
    fix = "set engine to paceline"
    if ENGINES[name].starts_engines:
        fix = f"`paceline run JOB --on {name}` starts {plan.engine} itself, and --dry-run shows its"
        fix += " files"
    first = Gap(
        what=f"engine {plan.engine}",
        where="engine",
        why=f"the plan is {plan.engine}'s, and these files start another program",
        nearest="the program beside these files, on the same ranks",
        fix=fix,
    )
    return first, *(
        replace(gap, fix="" if gap.nearest else fix) if gap.where.startswith("layout.") else gap
        for gap in gaps
        if gap.where != "engine_path"
    )


def _without_data(files: Files, job: Job) -> Iterator[Gap]:
    """A note where the example program is written and the job names no data, as no plan needs."""
    data = job.spec.data
    is_read = any(SETTINGS in each for file in files.items() for each in file)
    if is_read and data.path is None and data.corpus is None and data.sources is None:
        yield Gap(
            what="data",
            where="data.path",
            why="the job names none",
            nearest=OWN_SCRIPT,
            fix="set data.path and render again",
        )


def _secrets_in(files: Files) -> Iterator[Problem]:
    """`J013` for each line that would hold a secret, wherever it came from."""
    for name, text in files.items():
        for secret in find_in_lines(text, "code" if name.endswith(".py") else "text"):
            yield Problem(
                code="J013",
                what=f"{name} line {secret.line} would hold {secret.kind}",
                where=name,
                fix="take it out of the job file or the file it comes from, and put it into the "
                "environment of the machines that need it",
            )


def renderer_of(engine: str) -> str | None:
    """The row of `ENGINES` that writes files for an engine of the catalog; None where none does.

    >>> renderer_of("fsdp1"), renderer_of("maxtext")
    ('accelerate', None)
    """
    name = _RENDERERS.get(engine, engine)
    return name if name in ENGINES else None


_RENDERERS = {"fsdp1": "accelerate"}
"""Engine of the catalog -> row of `ENGINES`, where the two names differ."""


def for_engine(job: Job, name: str) -> Job:
    """The job as it is planned for files of a name of `ENGINES`: where an engine of the catalog has
    that name, it is the job's, so that the plan holds what the files can say. A place, a launcher,
    and the job's own engine leave the job as it is."""
    if name not in ENGINE_NAMES or renderer_of(job.spec.engine) == name:
        return job
    return replace(job, spec=replace(job.spec, engine=name, engine_version=""))


def check_files(plan: Plan, job: Job, *, own_program: bool = True) -> Iterator[Problem]:
    """What keeps the files of the plan's own engine from being written, as `render_job` refuses it;
    nothing where Paceline writes none for it, as `check_release` has it."""
    found = _gaps_of(plan, job, own_program=own_program)
    name = renderer_of(plan.engine) or ""
    yield from _refusals(name, found, job, plan.profile, plan.decoder)


def leaves_out(plan: Plan, job: Job) -> list[Gap]:
    """What the job sets in `train` and the files of the plan's own engine leave out, where no
    program of one's own would do it."""
    return [
        gap
        for gap in _gaps_of(plan, job, own_program=True)
        if gap.where.startswith("train.") and tuple(gap.where.split(".")) in job.lines
        if gap.nearest is not None and not needs_own_program(gap)
    ]


def writes(plan: Plan, job: Job) -> bool:
    """Whether `check_files` refuses nothing; tries no other engine."""
    return all(gap.nearest is not None for gap in _gaps_of(plan, job, own_program=True))


def _gaps_of(plan: Plan, job: Job, *, own_program: bool) -> tuple[Gap, ...]:
    """Gaps of the plan's own engine; none where no files are written for it."""
    name = renderer_of(plan.engine)
    if name is None or check_release(plan) is not None:
        return ()
    module = cast(EngineModule, importlib.import_module(find(name).module))
    return _gaps(module, plan, job, own_program=own_program)


def check_release(plan: Plan) -> Problem | None:
    """What to report of a plan whose engine, or this release of it, is only estimated."""
    problem = check_has_files(plan.engine, plan.engine_version, plan.cluster)
    told = next((each.fix for each in plan.cautions if each.about == "files"), "")
    return replace(problem, fix=told) if problem and told else problem


def check_model(job: Job, facts: ModuleFacts | None = None) -> Iterator[Problem]:
    """What keeps files of the job's engine from describing its model, whatever the layout."""
    name = renderer_of(job.spec.engine)
    if name is not None:
        module = importlib.import_module(find(name).module)
        gaps = getattr(module, "model_gaps", None)
        if gaps is not None:
            model = resolve_profile(job, facts), resolve_decoder(job)
            yield from _refusals(name, tuple(gaps(*model, config_of(job))), job, *model)


def _gaps(module: EngineModule, plan: Plan, job: Job, *, own_program: bool) -> tuple[Gap, ...]:
    own = list(module.gaps(plan, job))
    found = (*own, *left_out(job, module.CARRIES, {gap.where for gap in own}))
    if own_program:
        return found
    name = renderer_of(plan.engine)
    engine = name if name in ANY_MODEL else "torchrun"
    return tuple(
        without_own_program(
            found,
            f"start your own script: `paceline run --script train.py --with {engine} JOB` "
            "(on Kubernetes: kubernetes.script)",
        )
    )


def _refusals(
    name: str,
    gaps: tuple[Gap, ...],
    job: Job,
    profile: ModelProfile,
    decoder: DecoderShape | None,
) -> list[Problem]:
    """`H002` for each gap that nothing comes near."""
    return [
        Problem(
            code="H002",
            what=f"{name} cannot express {gap.what}: {gap.why}",
            where=job.where(gap.where),
            fix="; or ".join(
                filter(None, (_that_plan(gap.engines, job, profile, decoder), gap.fix))
            )
            or "choose another engine: `paceline render --for list`",
        )
        for gap in gaps
        if gap.nearest is None
    ]


def _that_plan(
    engines: tuple[str, ...], job: Job, profile: ModelProfile, decoder: DecoderShape | None
) -> str:
    """Which of some engines plan this very job and write its files, tried one by one; what each
    refuses where none does."""
    refused = {name: _refused_with(name, job, profile, decoder) for name in engines}
    able = [name for name, problem in refused.items() if problem is None]
    if able:
        return (
            f"set engine to {' or '.join(able)}, whose files start your own script with any model"
        )
    told = "; ".join(
        f"{name}: {each.code}, {each.what.splitlines()[0]}"
        for name, each in refused.items()
        if each
    )
    return f"no other engine takes this job as it is ({told})" if told else ""


def _refused_with(
    engine: str, job: Job, profile: ModelProfile, decoder: DecoderShape | None
) -> Problem | None:
    """The first that another engine refuses of the job."""
    other = for_engine(job, engine)
    other = replace(other, spec=replace(other.spec, engine_path=None))
    try:
        cluster = find_cluster(other.spec.cluster, other)
        plan = make_plan(other, cluster, profile, decoder, advise=False)
    except PacelineError as error:
        return error.problems[0]
    return next(check_files(plan, other), None)

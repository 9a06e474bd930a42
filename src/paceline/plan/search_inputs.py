"""What a job asks of the search: the space of its layouts, its engine, precision and what they are
priced with, and which of its own choices do not go together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline.catalog import Catalog
from paceline.catalog.efficiencies import Efficiencies, load_efficiencies, with_measured
from paceline.catalog.engines import Engine, as_asked, find_engine
from paceline.choices import Precision
from paceline.errors import Problem
from paceline.estimate import Case, case_of
from paceline.estimate.engine_memory import compressed_share
from paceline.job import Job
from paceline.job.data_rules import objective_of
from paceline.job.engine import ENGINE_NAMES
from paceline.parallel import Space, abilities_of, check_layout_choices
from paceline.parallel.abilities import OURS, Abilities, planned_engine
from paceline.parallel.engine_laws import check_training
from paceline.plan.decision import Plan
from paceline.plan.expert_exchange import check_exchange, excluded_by_exchange
from paceline.profile import (
    DecoderShape,
    ModelProfile,
    resolve_config,
    resolve_decoder,
    splits_of,
)
from paceline.topology import Cluster

CanRun = Callable[[Plan, Job], bool]
"""Whether what the plan's engine writes for the job runs it: rendering is above this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All that a plan is made of."""

    job: Job
    cluster: Cluster
    profile: ModelProfile
    decoder: DecoderShape | None
    catalog: Catalog
    must_fit: bool = True
    advises: bool = True
    """Whether changes that make it fit are looked for where nothing does."""

    can_run: CanRun | None = None


def clashes(job: Job, cluster: Cluster, space: Space) -> list[Problem]:
    """What of the job's own choices does not go together."""
    return [
        *check_layout_choices(job, space),
        *check_training(job, space.abilities, cluster.backend),
        *_check_precision(job, cluster),
        *_check_recipe(job, cluster),
        *check_exchange(job, cluster, space.profile),
    ]


def space_of(job: Job, cluster: Cluster, profile: ModelProfile) -> Space:
    """Where layouts for a job are looked for: on this machine, what `paceline run` can do."""
    engine = engine_of(job, cluster).name
    runs_here = cluster.is_local and engine == "paceline"
    abilities = _abilities_here(job) if runs_here else abilities_of(engine)
    if profile.adapter is not None:
        abilities = replace(abilities, **abilities.beside_adapters)
    if engine == "paceline" and (objective := objective_of(job.spec)) != "next_token":
        abilities = replace(abilities, context_kinds=())  # a pair is compared whole
        if objective == "classification":  # nobody has split the new head
            abilities = replace(abilities, tensor=False, schedules=(), expert=False)
    if engine == "paceline" and profile.lacks_adapters:  # which stage has which is not known
        abilities = replace(abilities, schedules=())
    excluded = (*abilities.excluded, *excluded_by_exchange(job, cluster, abilities))
    abilities = replace(abilities, excluded=excluded)
    return Space(
        num_ranks=cluster.num_ranks,
        backend=cluster.backend,
        global_batch=job.spec.train.global_batch,
        profile=profile,
        domain=cluster.domain,
        ranks_per_node=cluster.ranks_per_node,
        fixed=job.spec.layout,
        abilities=abilities,
        accumulates=not job.spec.train.optimizer_in_backward,
    )


def engine_of(job: Job, cluster: Cluster) -> Engine:
    """The engine that runs the job's steps. Our own runs on no Mac's GPU: there it is MLX."""
    spec = job.spec
    if cluster.backend == "mlx" and spec.engine == "paceline":
        return find_engine("mlx", ENGINE_NAMES["mlx"].planned)
    return find_engine(spec.engine, spec.engine_version or ENGINE_NAMES[spec.engine].planned)


def _abilities_here(job: Job) -> Abilities:
    """What `paceline run` can do with the job's model. A module of the person's own is split over
    data ranks alone, as nothing is known of its inside, unless the job says otherwise."""
    asked = resolve_config(job)
    if asked is None:
        return OURS
    built_in = resolve_decoder(job) is not None
    splits = splits_of(asked.config, job.spec.data.seq_len, built_in=built_in)
    return replace(
        OURS,
        tensor=splits.tensor,
        schedules=OURS.schedules if splits.pipeline else (),
        context_kinds=splits.context_kinds,
        expert=splits.expert,
    )


def case_of_asked(asked: Asked) -> Case:
    spec = asked.job.spec
    kind, rank = spec.train.gradient_compression, spec.train.powersgd_rank
    engine = planned_engine(engine_of(asked.job, asked.cluster))
    engine = as_asked(
        engine,
        states=spec.train.states,
        attention=spec.train.attention,
        fp8_recipe=spec.train.fp8_recipe,
        async_tensor=spec.train.async_tensor,
        token_dispatcher=spec.train.token_dispatcher,
        async_expert=spec.train.async_expert,
        optimizer_in_backward=spec.train.optimizer_in_backward,
        is_compiled=spec.train.compile,
    )
    return case_of(
        asked.profile,
        asked.cluster,
        precision=decide_precision(asked.job, asked.cluster),
        optimizer=spec.train.optimizer,
        engine=engine,
        efficiencies=efficiencies_of(asked),
        replica_share=compressed_share(asked.profile, kind, rank),
        error_bytes=4.0 if kind == "powersgd" else 0.0,
        loss_chunk=spec.train.loss_chunk if engine.name == "paceline" else 0,
    )


def efficiencies_of(asked: Asked) -> Efficiencies:
    rows = asked.catalog.efficiencies
    return with_measured(load_efficiencies(), rows, accelerator=asked.cluster.accelerator)


def decide_precision(job: Job, cluster: Cluster) -> Precision:
    """As asked; left open, bf16 on an accelerator that is known to have it, else fp16 on one that
    has that; fp32 elsewhere."""
    asked = job.spec.train.precision
    if asked != "auto":
        return asked
    if job.spec.train.states != "auto":
        return job.spec.train.states
    if cluster.backend == "gloo":
        return "fp32"
    engine = engine_of(job, cluster).name
    has = abilities_of(engine).precisions
    known = [name for name in cluster.peak_flops_per_s if has is None or name in has]
    if "bf16" in known:
        return "bf16"
    return "fp16" if "fp16" in known else "fp32"


def _check_precision(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """A precision that the accelerator is known to lack; an unknown accelerator may have it."""
    asked, known = job.spec.train.precision, cluster.peak_flops_per_s
    if asked == "auto" or asked == "fp32" or not known or asked in known:
        return
    yield Problem(
        code="L003",
        what=f"train.precision is {asked}, and {cluster.accelerator} has no {asked}",
        where=job.where("train.precision"),
        fix=f"set train.precision to {' or '.join(kind for kind in known if kind != 'fp4')}, "
        "or leave it at auto",
    )


def _check_recipe(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Accelerators that scale blocks of 32 numbers in their matrices have fp4 as well."""
    known = cluster.peak_flops_per_s
    if job.spec.train.fp8_recipe != "mxfp8" or not known or "fp4" in known:
        return
    yield Problem(
        code="L003",
        what=f"train.fp8_recipe is mxfp8, which {cluster.accelerator} has not; B200 has",
        where=job.where("train.fp8_recipe"),
        fix="leave train.fp8_recipe out: the engine's own scaling is planned",
    )

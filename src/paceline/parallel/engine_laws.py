"""What a layout must obey because of the software that runs it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from paceline.catalog.accelerator import Backend
from paceline.errors import Problem
from paceline.job import Job, LayoutSpec, TrainSpec
from paceline.job.data_rules import objective_of
from paceline.job.engine import has_files
from paceline.parallel.abilities import ABILITIES, Abilities, Excluded, engines_over
from paceline.parallel.candidates import Space
from paceline.parallel.degrees import asks_for_pipeline, num_fixed_ranks, with_implied
from paceline.units import counted


def asked_of_all_reduce(train: TrainSpec, able: Abilities) -> list[str]:
    """Fields of `train` that only an all-reduce of whole gradients uses, as the job has them and
    the engine does."""
    usual = {"bucket": "auto", "static_graph": False, "gradient_compression": "none"}
    asked = [name for name in able.all_reduce_asks if getattr(train, name) != usual[name]]
    return [f"train.{name}" for name in asked]


def all_reduced(train: TrainSpec, fixed: LayoutSpec, able: Abilities) -> LayoutSpec:
    """What a job fixes of its layout, and an all-reduce of whole gradients where its `train` asks
    for one: no sharding, and for DDP's promises and PowerSGD whole matrices on every rank.

    >>> train = TrainSpec(global_batch=8, static_graph=True)
    >>> all_reduced(train, LayoutSpec(tensor=2), ABILITIES["paceline"]).pipeline
    1
    """
    asked = asked_of_all_reduce(train, able)
    whole: dict[str, Any] = {"sharding": "none"} if asked else {}
    is_powersgd = train.gradient_compression == "powersgd"
    if "train.static_graph" in asked or ("train.gradient_compression" in asked and is_powersgd):
        whole |= {"tensor": 1, "pipeline": 1, "expert": 1}
    opened = {name: value for name, value in whole.items() if getattr(fixed, name) == "auto"}
    return replace(fixed, **opened)


def check_engine(job: Job, space: Space) -> Iterator[Problem]:
    """An engine has some ways to split and not others."""
    asked, able = job.spec.layout, space.abilities
    fixed = with_implied(asked)
    words: list[tuple[str, str, Sequence[str]]] = [
        ("sharding", fixed.sharding, able.shardings),
        ("recompute", fixed.recompute, able.recomputes),
        ("offload", fixed.offload, able.offloads),
    ]
    if able.schedules:
        words.append(("schedule", fixed.schedule, able.schedules))
    if able.context_kinds:
        words.append(("context_kind", fixed.context_kind, able.context_kinds))
    for name, value, known in words:
        if value != "auto" and value not in known:
            # What was written is the field from which this one follows.
            is_implied = getattr(asked, name) == "auto"
            field = _IMPLIED_BY[name] if is_implied else name
            of = f" ({field} is of {name} {value})" if is_implied else ""
            yield _not_of_engine(job, space, name, value, ", ".join(known) + of, field)
    has = {
        "tensor": able.tensor,
        "pipeline": bool(able.schedules),
        "context": bool(able.context_kinds),
        "expert": able.expert,
    }
    if not able.schedules and asks_for_pipeline(fixed):
        field = "chunks" if asked.schedule == "auto" else "schedule"
        yield _not_of_engine(job, space, "schedule", fixed.schedule, "no pipeline", field)
    in_pipeline = fixed.pipeline not in ("auto", 1) or asks_for_pipeline(fixed)
    only_without = set(able.shardings) - set(able.pipeline_shardings)
    if in_pipeline and able.schedules and fixed.sharding in only_without:
        yield _not_in_pipeline(job, space, fixed.sharding)
    for name, is_there in has.items():
        degree = getattr(fixed, name)
        if not is_there and degree not in ("auto", 1):
            beside = " beside an adapter" if name in able.beside_adapters else ""
            yield _not_of_engine(job, space, name, degree, f"no {name} parallelism{beside}")
    yield from _check_sizes(job, space)
    yield from _check_offload(job, space)
    for excluded in able.excluded:
        if excluded.asks(fixed):
            yield _not_together(job, excluded)


def check_training(job: Job, able: Abilities, backend: Backend) -> Iterator[Problem]:
    """The precision, the optimizer and what else an engine's files can ask for."""
    yield from _check_asked(job, able, backend)
    train = job.spec.train
    for name, value, known in (
        ("precision", train.precision, able.precisions),
        ("optimizer", train.optimizer, able.optimizers),
    ):
        if known is None or value == "auto" or value in known:
            continue
        yield Problem(
            code="L012",
            what=f"train.{name} is {value}, which {job.spec.engine} cannot do: it has "
            f"{', '.join(known)}",
            where=job.where(f"train.{name}"),
            fix=f"set train.{name} to {' or '.join(known)}, or name another engine",
        )


def _check_asked(job: Job, able: Abilities, backend: Backend) -> Iterator[Problem]:
    """What only some engines' files can ask for; named are those that train over `backend`."""
    train, engine = job.spec.train, job.spec.engine
    for field, abilities, what in (
        ("cluster.mlx_backend", "mlx_backends", "it"),
        ("train.states", "states", "a type of its states"),
        ("train.attention", "attentions", "a kernel"),
        ("train.fp8_recipe", "fp8_recipes", "this scaling"),
        ("train.async_tensor", "async_tensor", "it"),
        ("train.token_dispatcher", "token_dispatchers", "a dispatcher"),
        ("train.async_expert", "async_expert", "it"),
        ("train.optimizer_in_backward", "optimizer_in_backward", "it"),
        ("train.compile", "compiles", "it"),
        ("train.gradient_compression", "compressions", "it"),
    ):
        wanted = attrgetter(field)(job.spec)
        if wanted in ("auto", "none", False) or _can_ask(able, abilities, wanted):
            continue
        others = [
            name
            for name in engines_over(backend)
            if _can_ask(ABILITIES[name], abilities, wanted) and _is_run(name)
        ]
        has = getattr(able, abilities)
        own = " or ".join(sorted(has)) if isinstance(has, Collection) else ""
        cannot = f"has {own}" if own else f"cannot be asked for {what}"
        cannot += f": {able.unasked[field]}" if field in able.unasked else ""
        yield Problem(
            code="L012",
            what=f"{field} is {_shown(wanted)}, and {engine} {cannot}",
            where=job.where(field),
            fix=(f"set {field} to {own}" if own else f"leave {field} out")
            + (f", or name an engine that has it: {', '.join(others)}" if others else ""),
        )
    if train.optimizer_in_backward and able.optimizer_in_backward and train.clip_norm is not None:
        yield Problem(
            code="L012",
            what=f"train.clip_norm is {train.clip_norm:g} and train.optimizer_in_backward true: "
            "the optimizer steps before the norm of all gradients is known",
            where=job.where("train.clip_norm"),
            fix="set train.clip_norm to null, or leave train.optimizer_in_backward out",
        )
    for field, needed in (("fp8_recipe", ("fp8",)), ("states", ("bf16", "auto"))):
        wanted = getattr(train, field)
        if wanted != "auto" and train.precision not in needed:
            yield Problem(
                code="L012",
                what=f"train.{field} is {wanted}, and train.precision {train.precision}",
                where=job.where(f"train.{field}"),
                fix=f"set train.precision to {needed[0]}, or leave train.{field} out",
            )


def _can_ask(able: Abilities, name: str, wanted: object) -> bool:
    has = getattr(able, name)
    return wanted == has if isinstance(has, bool) else wanted in has


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_sizes(job: Job, space: Space) -> Iterator[Problem]:
    """Stages, recomputed blocks and groups of sizes that the engine does not have."""
    fixed, able, engine = job.spec.layout, space.abilities, job.spec.engine
    blocks, pipeline = space.profile.num_blocks, fixed.pipeline
    if able.equal_stages and pipeline != "auto" and blocks % pipeline and pipeline <= blocks:
        ranks = space.num_ranks * pipeline // num_fixed_ranks(fixed)
        good = [n for n in range(1, blocks + 1) if blocks % n == 0 and ranks % n == 0]
        yield _of_engine(
            job,
            "pipeline",
            f"does not divide {blocks} blocks, and {engine} has as many on each stage",
            f"set layout.pipeline to {' or '.join(map(str, good)) or 'auto'}",
            _others(job, space, lambda each: not each.equal_stages),
        )
    every = fixed.recompute_every
    if not able.recomputes_some and every not in ("auto", 1):
        why = f"{engine} cannot do: it recomputes every block or none"
        fix = "leave layout.recompute_every out"
        others = _others(job, space, lambda each: each.recomputes_some)
        yield _of_engine(job, "recompute_every", f"which {why}", fix, others)
    if able.hybrid_in_node and fixed.shard not in ("auto", space.ranks_per_node):
        why = (
            f"{engine} cannot do: its groups are the nodes, of "
            f"{counted(space.ranks_per_node, 'rank')}"
        )
        others = _others(job, space, lambda each: not each.hybrid_in_node)
        yield _of_engine(job, "shard", f"which {why}", "leave layout.shard out", others)
    context = 1 if fixed.context == "auto" else fixed.context
    if able.shards_over_context and fixed.shard != "auto" and fixed.shard % context:
        why = f"{engine} cannot do: a group of shards is whole groups of {context} context ranks"
        others = _others(job, space, lambda each: not each.shards_over_context)
        fix = f"set layout.shard to a multiple of {context}, or leave it out"
        yield _of_engine(job, "shard", f"which {why}", fix, others)


def _check_offload(job: Job, space: Space) -> Iterator[Problem]:
    """What is offloaded with the optimizer state, and the folder on a disk."""
    fixed, able, engine = with_implied(job.spec.layout), space.abilities, job.spec.engine
    moves = fixed.offload_parameters
    if moves != "auto" and moves not in able.offloads_parameters and fixed.offload != "none":
        has = (
            "they move with the optimizer state, always"
            if able.offloads_parameters == (True,)
            else "it offloads optimizer state alone"
        )
        why = f"which {engine} cannot do: {has}"
        others = _others(job, space, lambda each: moves in each.offloads_parameters)
        fix = "leave layout.offload_parameters out"
        yield _of_engine(job, "offload_parameters", why, fix, others)
    if fixed.offload == "none" and moves is True:
        yield Problem(
            code="L024",
            what="layout.offload_parameters is true, and layout.offload is none",
            where=job.where("layout.offload_parameters"),
            fix="set layout.offload to cpu, or leave layout.offload_parameters out",
        )
    if fixed.offload == "nvme" and "nvme" in able.offloads and fixed.offload_path is None:
        yield Problem(
            code="H020",
            what="optimizer state goes to NVMe, and no folder is named for it",
            where=job.where("layout"),
            fix="layout.offload_path: /local_nvme, a folder on each node's own disk",
        )


def _others(job: Job, space: Space, has: Callable[[Abilities], bool]) -> list[str]:
    """Engines with files that train on these machines and take all that this job fixes."""
    there = replace(space, backend=None)

    def takes(name: str) -> bool:
        other = replace(job, spec=replace(job.spec, engine=name))
        return not any(check_engine(other, replace(there, abilities=ABILITIES[name])))

    return [
        name
        for name in engines_over(space.backend)
        if name != job.spec.engine and _is_run(name) and has(ABILITIES[name]) and takes(name)
    ]


def _is_run(engine: str) -> bool:
    """Whether Paceline runs an engine or writes its files, and does not only estimate it."""
    return engine == "paceline" or has_files(engine, "")


def _or_another(others: Sequence[str]) -> str:
    """The end of a fix."""
    return f", or set engine to {' or '.join(others)}" if others else ""


def _of_engine(job: Job, field: str, why: str, fix: str, others: Sequence[str]) -> Problem:
    """L012 of one field, whose value the sentence begins with."""
    value = str(getattr(job.spec.layout, field)).lower()
    return Problem(
        code="L012",
        what=f"layout.{field} is {value}, {why}"
        if why.startswith("which")
        else f"layout.{field} {value} {why}",
        where=job.where(f"layout.{field}"),
        fix=fix + _or_another(others),
    )


def _not_together(job: Job, excluded: Excluded) -> Problem:
    """Fields that the engine has each and not together."""
    layout = with_implied(job.spec.layout)
    given = " with ".join(f"{name} {getattr(layout, name)}" for name in excluded.when)
    # `recompute_every` alone implies what is recomputed.
    first, *others = (
        "recompute_every" if name == "recompute" and job.spec.layout.recompute == "auto" else name
        for name in excluded.when
    )
    last = [first, *others][-1]
    return Problem(
        code="L012",
        what=f"{job.spec.engine} cannot do {given}: {excluded.why}",
        where=job.where(f"layout.{last}"),
        fix=f"leave layout.{last} out" + f", or layout.{first}" * bool(others),
    )


def _not_in_pipeline(job: Job, space: Space, sharding: str) -> Problem:
    """A sharding that the engine has, and not together with a pipeline."""
    engine = job.spec.engine
    ours = engine == "paceline"
    others = _others(job, space, lambda each: sharding in each.pipeline_shardings)
    return Problem(
        code="L012",
        what=f"layout.sharding is {sharding}, which "
        + (
            "Paceline's own runtime does not do in a pipeline: torch's schedules reduce gradients "
            "once a step, and hold them whole until then"
            if ours
            else f"{engine} cannot do in a pipeline"
        ),
        where=job.where("layout.sharding"),
        fix=f"set layout.sharding to {' or '.join(space.abilities.pipeline_shardings)}, or "
        f"layout.pipeline to 1{_or_another(others)}",
    )


_IMPLIED_BY = {
    "sharding": "shard",
    "recompute": "recompute_every",
    "schedule": "chunks",
    "offload": "offload_parameters",
}

_WHOLE = {
    "dpo": (("context",), "Paceline compares the answers of a pair whole, on one context rank"),
    "classification": (
        ("tensor", "pipeline", "schedule", "context", "expert"),
        "Paceline has not split the new head of a classifier",
    ),
}
"""Loss -> splits that our runtime does not do with it, as `plan.space_of` has it, and why."""


def _whole_with(job: Job, space: Space, name: str) -> str:
    """What of the job our runtime does not split in this way, and why; empty where nothing is."""
    whole, why = _WHOLE.get(objective_of(job.spec), ((), ""))
    if name in whole:
        return f"data.kind {job.spec.data.kind} does not go with: {why}"
    if name in ("pipeline", "schedule") and space.profile.lacks_adapters:
        return (
            "train.adapter.targets does not go with: some blocks have none of these linears, and a "
            "stage of such blocks would have nothing to train"
        )
    return ""


def _not_of_engine(
    job: Job, space: Space, name: str, value: object, has: str, field: str | None = None
) -> Problem:
    """`field` is what was written, where `name` only follows from it."""
    is_mlx = space.abilities == ABILITIES["mlx"]
    field, engine = field or name, "mlx" if is_mlx else job.spec.engine
    written = getattr(job.spec.layout, field)
    ours = engine == "paceline"
    if ours and (why := _whole_with(job, space, name)):
        return Problem(
            code="L012",
            what=f"layout.{field} is {written}, which {why}",
            where=job.where(f"layout.{field}"),
            fix=f"leave layout.{field} out, and split the work over data ranks (layout.data, "
            "layout.sharding)",
        )
    others = _others(job, space, lambda able: _has(able, name, value))
    return Problem(
        code="L012",
        what=f"layout.{field} is {written}, which Paceline"
        + (
            f"'s own runtime cannot do: it has {has}"
            if ours
            else f" does not write for {engine}: its files have {has}"
        ),
        where=job.where(f"layout.{field}"),
        fix=f"leave layout.{field} out{_or_another(others)}",
    )


def _has(able: Abilities, name: str, value: object) -> bool:
    words = {
        "sharding": able.shardings,
        "recompute": able.recomputes,
        "offload": able.offloads,
        "schedule": able.schedules,
        "context_kind": able.context_kinds,
    }
    if name in words:
        return value in words[name]
    degrees = {"pipeline": able.schedules, "context": able.context_kinds}
    return bool(degrees[name]) if name in degrees else bool(getattr(able, name))

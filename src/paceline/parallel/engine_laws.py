"""What a layout must obey because of the software that runs it."""

from collections.abc import Iterator, Sequence

from paceline.errors import Problem
from paceline.job import Job
from paceline.job.data_fields import objective_of
from paceline.parallel.abilities import ABILITIES, Abilities
from paceline.parallel.candidates import Space, asks_for_pipeline, with_implied


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
            has_words = f"it has {', '.join(known)}"
            if is_implied:
                has_words = f"it is of {name} {value}, and {has_words}"
            yield _not_of_engine(job, space, name, value, has_words, field)
    has = {
        "tensor": able.tensor,
        "pipeline": bool(able.schedules),
        "context": bool(able.context_kinds),
        "expert": able.expert,
    }
    if not able.schedules and asks_for_pipeline(fixed):
        field = "chunks" if asked.schedule == "auto" else "schedule"
        yield _not_of_engine(job, space, "schedule", fixed.schedule, "it has no pipeline", field)
    in_pipeline = fixed.pipeline not in ("auto", 1) or asks_for_pipeline(fixed)
    only_without = set(able.shardings) - set(able.pipeline_shardings)
    if in_pipeline and able.schedules and fixed.sharding in only_without:
        yield _not_in_pipeline(job, fixed.sharding, able)
    for name, is_there in has.items():
        degree = getattr(fixed, name)
        if not is_there and degree not in ("auto", 1):
            yield _not_of_engine(job, space, name, degree, f"it has no {name} parallelism")


def _not_in_pipeline(job: Job, sharding: str, able: Abilities) -> Problem:
    """A sharding that the engine has, and not together with a pipeline."""
    engine = job.spec.engine
    ours = engine == "paceline"
    others = [name for name, each in ABILITIES.items() if sharding in each.pipeline_shardings]
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
        fix=f"set layout.sharding to {' or '.join(able.pipeline_shardings)}, or layout.pipeline to "
        f"1, or name an engine that has it: {', '.join(others) or 'none is known'}",
    )


_IMPLIED_BY = {"sharding": "shard", "recompute": "recompute_every", "schedule": "chunks"}

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
    field, engine = field or name, job.spec.engine
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
    others = [n for n, able in ABILITIES.items() if n != engine and _has(able, name, value)]
    return Problem(
        code="L012",
        what=f"layout.{field} is {written}, which "
        + (f"Paceline's own runtime cannot do: {has}" if ours else f"{engine} cannot do: {has}"),
        where=job.where(f"layout.{field}"),
        fix=f"leave layout.{field} out, or name an engine that has it: "
        f"{', '.join(others) or 'none is known'}",
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

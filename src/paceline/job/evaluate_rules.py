"""Rules of the section `evaluate`, and what its fields ask of checkpoints."""

from collections.abc import Callable, Iterator

from paceline.errors import Problem
from paceline.job.data_rules import objective_of
from paceline.job.evaluate import EvaluateSpec
from paceline.job.job import JobSpec


def num_best(spec: JobSpec) -> int:
    """How many checkpoints with the lowest evaluation loss are kept: one with early stopping."""
    return max(spec.checkpoint.keep_best, 1 if spec.evaluate.patience is not None else 0)


def kept_every(spec: JobSpec) -> int | None:
    """Every how many steps a checkpoint is kept, because it was asked for or to be evaluated."""
    asked = (spec.checkpoint.keep_every, spec.evaluate.outputs_every)
    return min((every for every in asked if every is not None), default=None)


def most_kept(spec: JobSpec) -> int:
    """How many checkpoints lie on the disk at most, with the one that is being written."""
    every, num_recent = kept_every(spec), spec.checkpoint.keep_last + num_best(spec) + 1
    return num_recent + (0 if every is None else spec.train.steps // every)


def check_evaluation(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for what would need evaluations that there are none of."""
    evaluate = spec.evaluate
    if evaluate.patience is None and evaluate.min_delta:
        yield Problem(
            code="J007",
            what=f"evaluate.min_delta {evaluate.min_delta:g} is given without evaluate.patience",
            where=where("evaluate.min_delta"),
            fix="add evaluate.patience, such as 3, or leave it out",
        )
    if evaluate.prompts is None and evaluate.prompt_tokens != _USUAL.prompt_tokens:
        yield Problem(
            code="J007",
            what=f"evaluate.prompt_tokens {evaluate.prompt_tokens} is given without prompts",
            where=where("evaluate.prompt_tokens"),
            fix="add evaluate.prompts, or leave it out",
        )
    yield from _check_outputs_every(spec, where)
    yield from _check_exported(spec, where)
    if not measures_loss(spec):
        for name, value in {
            "evaluate.patience": evaluate.patience,
            "checkpoint.keep_best": spec.checkpoint.keep_best,
        }.items():
            if value:
                yield _not_measured(name, where)


def measures_loss(spec: JobSpec) -> bool:
    """Whether there is anything to evaluate on; a program's own data are not known here."""
    data = spec.data
    has_none = data.held_out == 0 and data.held_out_path is None
    return not (has_none and spec.program is None and spec.engine == "paceline")


def check_measured(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for evaluations that a new run would not make; earlier runs with them can be read."""
    for name in ("every", "samples"):
        if not measures_loss(spec) and getattr(spec.evaluate, name) != getattr(_USUAL, name):
            yield _not_measured(f"evaluate.{name}", where)


_USUAL = EvaluateSpec()


def _not_measured(name: str, where: Callable[[str], str]) -> Problem:
    return Problem(
        code="J007",
        what=f"{name} goes by the evaluation loss, and data.held_out is 0",
        where=where(name),
        fix="set data.held_out to 0.05, or leave it out",
    )


def _check_outputs_every(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    every, keep_every = spec.evaluate.outputs_every, spec.checkpoint.keep_every
    if every is None:
        return
    if spec.evaluate.prompts is None and not spec.evaluate.tasks:
        yield Problem(
            code="J007",
            what=f"evaluate.outputs_every {every} is given without prompts and tasks",
            where=where("evaluate.outputs_every"),
            fix="add evaluate.prompts or evaluate.tasks, or leave it out",
        )
    if keep_every is not None and max(every, keep_every) % min(every, keep_every):
        yield Problem(
            code="J007",
            what=f"evaluate.outputs_every {every} and checkpoint.keep_every {keep_every} keep "
            "checkpoints of different steps, and neither is a multiple of the other",
            where=where("evaluate.outputs_every"),
            fix=f"set it to {keep_every}, or leave checkpoint.keep_every out",
        )


def _check_exported(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for what is asked of an exported model, where there is none that could do it."""
    evaluate = spec.evaluate
    for name, is_asked, fix in (
        ("prompts", evaluate.prompts is not None, "leave it out, and generate from your program"),
        ("tasks", bool(evaluate.tasks), "leave it out, and call lm_eval from your program"),
    ):
        if is_asked and spec.program is not None:
            yield Problem(
                code="J007",
                what=f"evaluate.{name} needs a model that can be exported, and program "
                f"{spec.program} builds its own",
                where=where(f"evaluate.{name}"),
                fix=fix,
            )
    for name in ("prompts", "tasks"):
        if not getattr(evaluate, name) or objective_of(spec) != "classification":
            continue
        yield Problem(
            code="J007",
            what=f"evaluate.{name} needs a model that writes text, and data.kind classification "
            "trains one that names classes",
            where=where(f"evaluate.{name}"),
            fix="leave it out: the evaluation loss and accuracy are measured on data.held_out",
        )

"""What must be the same to the last bit: the same sums in the same order."""

from collections.abc import Iterator

from paceline.check.verify.equality import runs_named
from paceline.check.verify.line import Line, skipped
from paceline.check.verify.locate import first_difference
from paceline.check.verify.runs import AGAIN, ELSEWHERE, JOB, RECOMPUTE, RESUMED
from paceline.record.verification import Facts


def check_repeat(facts: Facts) -> Iterator[Line]:
    """A run that is repeated ends with the same bits."""
    yield _same_bits(
        facts,
        AGAIN,
        "same run, same bits",
        "something draws random numbers, or sums in the order in which ranks arrive",
        "use deterministic operations: torch.use_deterministic_algorithms(True)",
    )


def check_resume(facts: Facts) -> Iterator[Line]:
    """Saving, loading and resuming changes no bit."""
    name = "save, load, resume"
    job, resumed = runs_named(facts, JOB), runs_named(facts, RESUMED)
    if not job or not resumed or job[0].refused or resumed[0].refused:
        yield skipped(name, "it was not run")
        return
    if resumed[0].loaded != job[0].saved:
        yield Line(
            name=name,
            status="fail",
            what="what was loaded is not what was saved",
            where=f"the checkpoint of step {_saved_step(facts)}",
            why="a part of the state is not in the checkpoint, or goes to another place",
            fix="see that every parameter, buffer and optimizer state is in named_state",
        )
        return
    yield _same_bits(
        facts,
        RESUMED,
        name,
        "the state is the same after loading: something outside it is not (learning rate, random "
        "numbers, samples)",
        "derive it from the step, or save it",
    )


def check_elsewhere(facts: Facts) -> Iterator[Line]:
    """A checkpoint that is loaded into other layouts has the same bits."""
    names = [run.name for run in facts.case.runs if run.name.startswith(f"{ELSEWHERE} ")]
    if not names:
        yield skipped("load in another layout", "the batch fits no other layout of as many ranks")
    job = runs_named(facts, JOB)
    for run_name in names:
        name = f"load into {run_name.removeprefix(f'{ELSEWHERE} ')}"
        runs = runs_named(facts, run_name)
        if not job or not runs or runs[0].refused or job[0].saved is None:
            yield skipped(name, (runs and runs[0].refused) or "it was not run")
        elif all(run.loaded == job[0].saved for run in runs):
            yield Line(name=name, status="pass", what=f"sha256 {job[0].saved[:16]}, as saved")
        else:
            wrong = [str(rank) for rank, run in enumerate(runs) if run.loaded != job[0].saved]
            yield Line(
                name=name,
                status="fail",
                what="the loaded state has another digest than the saved one",
                where=f"the checkpoint of step {_saved_step(facts)}, rank {', '.join(wrong)}",
                fix="see that every tensor is saved as a part of the whole, at its place",
            )


def check_recompute(facts: Facts) -> Iterator[Line]:
    """Recomputing a block gives the bits it gave."""
    kind = "without" if facts.case.layout.recompute != "none" else "with"
    yield _same_bits(
        facts,
        RECOMPUTE,
        f"same bits {kind} recompute",
        "what is computed again is not what was computed before: random numbers, or another type",
        "keep random states in the checkpointed block, or do not recompute it",
    )


def _same_bits(facts: Facts, run_name: str, name: str, why: str, fix: str) -> Line:
    job, others = runs_named(facts, JOB), runs_named(facts, run_name)
    refused = next((run.refused for run in [*job, *others] if run.refused), None)
    if refused or not job or not others:
        return skipped(name, refused or "it was not run")
    differences = [
        (step, parameter, rank)
        for rank, (one, other) in enumerate(zip(job, others, strict=True))
        for step, parameter in first_difference(one.steps, other.steps)
    ]
    if not differences and job[0].ended == others[0].ended:
        return Line(name=name, status="pass", what=f"sha256 {(job[0].ended or '')[:16]} at the end")
    if not differences:
        return Line(
            name=name,
            status="fail",
            what="parameters are the same bits, optimizer state or buffers are not",
            where="the end",
            why=why,
            fix=fix,
        )
    step, parameter, _ = min(differences, key=lambda each: each[0])
    ranks = sorted({rank for at, what, rank in differences if (at, what) == (step, parameter)})
    return Line(
        name=name,
        status="fail",
        what=f"{len({p for s, p, _ in differences if s == step})} parameters differ",
        where=f"step {step}, {parameter}, rank {', '.join(map(str, ranks))}",
        why=why,
        fix=fix,
    )


def _saved_step(facts: Facts) -> int:
    return next(run.save_after or 0 for run in facts.case.runs if run.name == JOB)

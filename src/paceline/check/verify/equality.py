"""Does the layout compute what a single device computes? In float64, and in the job's precision."""

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, sqrt

from paceline.check.verify.line import Line, judged, skipped
from paceline.check.verify.locate import locate, reading_of_ranks
from paceline.check.verify.runs import COMPRESSED, JOB, SCHEDULE, WHOLE_BATCH, WIDE
from paceline.check.verify.tolerance import Kind, Tolerance
from paceline.record.verification import Deviation, Facts, Reduction, ReferenceStep, RunFacts


def check_wide(facts: Facts) -> Iterator[Line]:
    """Losses, norms, gradients, parameters of every step in float64."""
    tolerance = Tolerance(facts.case, facts.reference)
    runs = runs_named(facts, WIDE)
    if not runs or not runs[0].steps:
        because = next((run.refused for run in runs if run.refused), "it was not run")
        yield skipped("equals one device", because)
        return
    fault = locate(facts, tolerance, WIDE)
    where = None if fault is None else fault.where
    why = None if fault is None else fault.looks_like
    fix = None if fault is None else fault.fix
    truth = facts.reference.wide
    for name, worst in (
        ("loss curve", _worst_loss(runs, truth, tolerance)),
        ("gradient norms", _worst_norm(runs, truth, tolerance)),
        ("outputs of modules", _worst_output(facts, tolerance)),
        ("gradients", _worst_of(runs, tolerance, "gradients")),
        ("parameters", _worst_of(runs, tolerance, "parameters")),
    ):
        seen, allowed, what = worst
        yield judged(
            f"{name} in float64",
            what,
            seen=seen,
            allowed=allowed,
            where=where,
            why=why,
            fix=fix,
        )


def check_same_sums(facts: Facts) -> Iterator[Line]:
    """Accumulated micro-batches equal the whole batch; schedules equal each other."""
    tolerance = Tolerance(facts.case, facts.reference)
    layout = facts.case.layout
    name = "accumulation"
    if layout.accumulation == 1:
        yield skipped(name, "the layout has one micro-batch a step")
    else:
        wide = runs_named(facts, WIDE)
        seen, allowed, what = _worst_of(
            [run for run in wide if run.steps], tolerance, "gradients", only_first=True
        )
        whole = runs_named(facts, WHOLE_BATCH)
        why: str | None = None
        if whole and whole[0].steps:
            alone = _worst_of(whole, tolerance, "gradients")
            is_right = alone[0] <= alone[1]
            why = (
                "the same layout without accumulation is right: the fault is in adding up"
                if is_right
                else "the same layout without accumulation is wrong as well"
            )
        yield judged(
            name,
            f"gradients of {layout.accumulation} micro-batches of {layout.micro_batch} against "
            f"{layout.global_batch} samples at once: {what}",
            seen=seen,
            allowed=allowed,
            where="step 1",
            why=why,
            fix="let every micro-batch's loss be a share of the whole batch's, and reduce once",
        )
    for run_name in _names(facts, SCHEDULE):
        runs = runs_named(facts, run_name)
        if runs[0].refused:
            yield skipped(run_name, runs[0].refused)
            continue
        seen, allowed, what = _worst_of(runs, tolerance, "parameters")
        yield judged(
            run_name,
            f"{what}, with another order of micro-batches",
            seen=seen,
            allowed=allowed,
            where="the schedule",
            fix="use the schedule that is right",
        )


def check_job_precision(facts: Facts) -> Iterator[Line]:
    """In the job's own precision the layout is as near to the truth as a single device is."""
    precision = facts.case.precision
    tolerance = Tolerance(facts.case, facts.reference)
    runs = runs_named(facts, JOB)
    if not runs or not runs[0].steps:
        because = next((run.refused for run in runs if run.refused), "it was not run")
        yield skipped(f"rounding in {precision}", because)
        return
    yield _narrow_loss(facts, runs, tolerance)
    yield _narrow_all(facts, runs, tolerance, "gradients")
    yield _narrow_all(facts, runs, tolerance, "parameters")
    yield _finite(runs)
    yield _reduced_wide(facts, runs)
    yield _scale(facts, runs)


def check_compression(facts: Facts) -> Iterator[Line]:
    """What compressing gradients changes: the loss curve with it, and without."""
    names = _names(facts, COMPRESSED)
    if not names:
        yield skipped("compressed gradients", "only DDP over several ranks can compress them")
    plain = _losses(runs_named(facts, JOB))
    for name in names:
        runs = runs_named(facts, name)
        if runs[0].refused:
            yield skipped(name, runs[0].refused)
            continue
        losses = _losses(runs)
        if not plain or len(plain) != len(losses):
            yield skipped(name, "there is no run without compression beside it")
            continue
        worst = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        fell = plain[0] - plain[-1]
        sent, whole = _sent_bytes(runs[0]), _sent_bytes(runs_named(facts, JOB)[0])
        what = (
            f"loss after {len(losses)} steps {losses[-1]:.6f} with, {plain[-1]:.6f} without; "
            f"largest difference {worst:.2g}, where the loss fell by {fell:.2g}; all-reduced "
            f"{sent:,} bytes a step, {whole:,} without"
        )
        is_finite = all(isfinite(each) for each in losses)
        yield Line(
            name=name,
            status="pass" if is_finite else "fail",
            what=what,
            seen=worst,
            why=None if is_finite else "the compressed sums overflow",
            fix=None if is_finite else "compress to bf16, whose range is float32's",
        )


def _sent_bytes(run: RunFacts) -> int:
    """Bytes of the gradients that are sent: sums of a few numbers, as of a norm, are left out."""
    return sum(each.num_bytes for each in run.reductions if each.num_bytes > _FEW_BYTES)


def runs_named(facts: Facts, name: str) -> list[RunFacts]:
    """One run, as every rank saw it."""
    return [rank.runs[name] for rank in facts.ranks if name in rank.runs]


def _names(facts: Facts, prefix: str) -> list[str]:
    return [run.name for run in facts.case.runs if run.name.startswith(f"{prefix} ")]


def _losses(runs: Sequence[RunFacts]) -> list[float]:
    found = []
    for index in range(min((len(run.steps) for run in runs), default=0)):
        steps = [run.steps[index] for run in runs]
        targets = sum(step.num_targets for step in steps)
        found.append(sum(step.loss_sum for step in steps) / targets if targets else float("nan"))
    return found


_Worst = tuple[float, float, str]
"""What was seen and allowed where it comes nearest to the limit or is furthest over it, and what
that is."""


def _worst(found: Iterator[_Worst]) -> _Worst:
    everything = list(found)
    if not everything:
        return 0.0, 0.0, "nothing to compare"
    worst = max(everything, key=lambda each: _excess(each[0], each[1]))
    return worst


def _excess(seen: float, allowed: float) -> float:
    share = seen / allowed if allowed else (0.0 if seen == 0 else float("inf"))
    return share if share == share else float("inf")


def _worst_loss(
    runs: Sequence[RunFacts], truth: Sequence[ReferenceStep], tolerance: Tolerance
) -> _Worst:
    losses = _losses(runs)
    first = next((i for i, each in enumerate(losses) if each != each), None)
    seen, allowed, what = _worst(
        (abs(loss - right.loss) / abs(right.loss), tolerance.loss(index + 1), f"step {index + 1}")
        for index, (loss, right) in enumerate(zip(losses, truth, strict=False))
    )
    if first is not None:
        return float("nan"), allowed, f"the loss of step {first + 1} is not a number"
    return seen, allowed, f"{len(losses)} steps, {losses[0]:.6f} to {losses[-1]:.6f}; worst {what}"


def _worst_norm(
    runs: Sequence[RunFacts], truth: Sequence[ReferenceStep], tolerance: Tolerance
) -> _Worst:
    seen, allowed, what = _worst(
        (
            abs(step.grad_norm - right.grad_norm) / right.grad_norm,
            max(tolerance.gradient(index + 1, name) for name in tolerance.reference.shapes),
            f"step {index + 1}",
        )
        for run in runs
        for index, (step, right) in enumerate(zip(run.steps, truth, strict=False))
    )
    return seen, allowed, f"{len(truth)} steps on {len(runs)} ranks; worst {what}"


def _worst_output(facts: Facts, tolerance: Tolerance) -> _Worst:
    found, unread = [], 0
    for index, truth in enumerate(facts.reference.wide):
        allowed = tolerance.forward(index + 1)
        for name, right in truth.modules.items():
            parts = {
                rank.rank: rank.runs[WIDE].steps[index].modules[name]
                for rank in facts.ranks
                if name in rank.runs[WIDE].steps[index].modules
            }
            off = reading_of_ranks(parts, right, allowed)
            if off is None:
                unread += index == 0
            else:
                found.append((off * allowed, allowed, f"{name} in step {index + 1}"))
    seen, allowed, what = _worst(iter(found))
    total = len(facts.reference.wide[0].modules)
    told = f"{total - unread} of {total} modules; worst {what}"
    return seen, allowed, told


def _worst_of(
    runs: Sequence[RunFacts], tolerance: Tolerance, kind: Kind, *, only_first: bool = False
) -> _Worst:
    limit = tolerance.gradient if kind == "gradients" else tolerance.parameter
    found = []
    names: set[str] = set()
    for run in runs:
        for step in run.steps[:1] if only_first else run.steps:
            deviations: dict[str, Deviation] = getattr(step, kind)
            names |= deviations.keys()
            found += [
                (
                    tolerance.off(each, kind, step.step),
                    limit(step.step, name),
                    f"{name} in step {step.step}",
                )
                for name, each in deviations.items()
            ]
            if kind == "gradients":
                found += [
                    (float("inf"), tolerance.wide, f"{name} has none in step {step.step}")
                    for name in step.missing
                ]
    seen, allowed, what = _worst(iter(found))
    total = len(tolerance.reference.shapes)
    return seen, allowed, f"{len(names)} of {total} tensors; worst {what}"


def _narrow_loss(facts: Facts, runs: Sequence[RunFacts], tolerance: Tolerance) -> Line:
    """The loss is one number, so all steps together stand for how far a single device is off."""
    wide, narrow = facts.reference.wide, facts.reference.narrow
    losses = _losses(runs)
    alone = _mean_square((a.loss, b.loss) for a, b in zip(narrow, wide, strict=True))
    seen = _mean_square((a, b.loss) for a, b in zip(losses, wide, strict=False))
    return judged(
        f"loss curve in {facts.case.precision}",
        f"differs from float64 by {seen:.2g} (one device: {alone:.2g})",
        seen=seen,
        allowed=tolerance.narrow(alone),
        where=f"{facts.case.precision} only, if float64 is right",
        why="more is rounded, or in a narrower type, than on one device",
        fix="look at the types of activations, and of what is summed over ranks",
    )


def _mean_square(pairs: Iterable[tuple[float, float]]) -> float:
    squares = [((found - truth) / truth) ** 2 for found, truth in pairs]
    return sqrt(sum(squares) / max(1, len(squares)))


def _narrow_all(facts: Facts, runs: Sequence[RunFacts], tolerance: Tolerance, kind: Kind) -> Line:
    worst: tuple[float, float, int] = (0.0, 1.0, 1)
    for index, truth in enumerate(facts.reference.narrow):
        seen = _share([getattr(run.steps[index], kind) for run in runs])
        alone = _share([getattr(truth, kind)])
        allowed = tolerance.narrow(alone)
        if _excess(seen, allowed) >= _excess(worst[0], worst[1]):
            worst = (seen, allowed, index + 1)
    seen, allowed, step = worst
    return judged(
        f"{kind} in {facts.case.precision}",
        f"step {step}: differs from float64 by {seen:.2g} (one device: "
        f"{allowed / tolerance.order:.2g})",
        seen=seen,
        allowed=allowed,
        where=f"step {step}",
        why="more is rounded, or in a narrower type, than on one device",
        fix="look at the types of activations, and of what is summed over ranks",
    )


def _share(ranks: Sequence[dict[str, Deviation]]) -> float:
    """Share of all tensors together; of each, the rank that is furthest off."""
    worst: dict[str, Deviation] = {}
    for deviations in ranks:
        for name, each in deviations.items():
            if name not in worst or not each.squares <= worst[name].squares:
                worst[name] = each
    of = sum(each.of for each in worst.values())
    return sqrt(sum(each.squares for each in worst.values()) / of) if of else 0.0


def _finite(runs: Sequence[RunFacts]) -> Line:
    bad = [
        (step.step, rank)
        for rank, run in enumerate(runs)
        for step in run.steps
        if not (isfinite(step.loss_sum) and isfinite(step.grad_norm))
    ]
    if not bad:
        steps = len(runs[0].steps)
        return Line(
            name="finite numbers", status="pass", what=f"{steps} steps, no NaN, no infinity"
        )
    step, rank = min(bad)
    return Line(
        name="finite numbers",
        status="fail",
        what=f"{len(bad)} losses or norms are not finite",
        where=f"step {step}, rank {rank}",
        why="an overflow, or a division by zero",
        fix="use bf16 or fp32, or lower train.learning_rate",
    )


def _scale(facts: Facts, runs: Sequence[RunFacts]) -> Line:
    """fp16's loss scale settles where nothing overflows, and is the same on all ranks."""
    name, steps = "loss scale", runs[0].steps
    if facts.case.precision != "fp16":
        return skipped(name, f"{facts.case.precision} needs none")
    scales = [step.loss_scale for step in steps]
    all_scales = zip(*([step.loss_scale for step in run.steps] for run in runs), strict=True)
    overflows = sum(step.num_overflows for step in steps)
    what = f"{scales[0]:g} to {scales[-1]:g} in {len(steps)} steps, {overflows} overflows"
    index = next((i for i, each in enumerate(all_scales) if len(set(each)) > 1), None)
    if index is not None:
        return Line(
            name=name,
            status="fail",
            what="ranks have different scales",
            where=f"step {steps[index].step}",
            why="they do not vote on overflows",
            fix="tell every rank's scaler what any rank found",
        )
    if scales[-1] <= _LEAST_SCALE:
        return Line(
            name=name,
            status="fail",
            what=what,
            where=f"step {steps[-1].step}",
            why="gradients overflow whatever the scale: the forward pass does",
            fix="set train.precision to bf16",
        )
    return Line(name=name, status="pass", what=what)


_FEW_BYTES = 64
"""Sums of losses, counts and norms are smaller: a guess."""

_LEAST_SCALE = 2.0**-14
"""Below it the loss scaler does not go."""


def _reduced_wide(facts: Facts, runs: Sequence[RunFacts]) -> Line:
    """Gradients must be summed in float32, whatever the matrices are multiplied in."""
    name = "gradients summed in float32"
    layout = facts.case.layout
    if layout.data * layout.context == 1:
        return skipped(name, "one rank has all samples: nothing is summed over ranks")
    group = {rank.rank for rank in facts.ranks}
    tensor_only = {
        tuple(sorted(r.rank for r in facts.ranks if (r.pipeline, r.data, r.context) == place))
        for place in {(r.pipeline, r.data, r.context) for r in facts.ranks}
    }
    seen: list[Reduction] = [
        each
        for run in runs
        for each in run.reductions
        if each.ranks not in tensor_only and set(each.ranks) <= group and each.count
    ]
    narrow = [each for each in seen if each.dtype in ("bfloat16", "float16")]
    sums = [each for each in seen if each.num_bytes > _FEW_BYTES]
    if not sums:
        return skipped(name, "no sum over the data ranks was seen")
    if not narrow:
        kinds = ", ".join(sorted({f"{each.kind} in {each.dtype}" for each in sums}))
        what = f"{kinds}: {_sent_bytes(runs[0]):,} bytes a step on rank 0"
        return Line(name=name, status="pass", what=what)
    worst = max(narrow, key=lambda each: each.num_bytes)
    return Line(
        name=name,
        status="fail",
        what=f"{worst.kind} of {worst.num_bytes:,} bytes in {worst.dtype}",
        where=f"ranks {', '.join(map(str, worst.ranks))}",
        why="every addition on the way rounds to 8 or 11 bits",
        fix="set the reduction's type to float32",
    )

"""Ranks that wait for one of them longer than a time limit allows."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Guard
from paceline.check.lint.names import INIT_GROUP
from paceline.check.lint.program import Program
from paceline.check.lint.rules.frameworks import is_small

LONG_WORK = frozenset({"map", "filter", "tokenize", "preprocess"})
DOWNLOADS = frozenset({"datasets.load_dataset", "huggingface_hub.snapshot_download"})
"""To download first on one rank is what every guide says; it is long only for large data."""


def check_long_wait(program: Program, context: Context) -> Iterator[Finding]:
    """Ranks wait at a barrier while rank 0 prepares data, with the default time-out."""
    inits = program.calls(INIT_GROUP)
    if not inits or any(one.has_argument(None, "timeout") for one in inits):
        return
    for barrier in program.calls("torch.distributed.barrier"):
        for work in sorted(program.all_calls, key=is_download):
            if work.order > barrier.order or not is_long(work):
                continue
            if any(work.order < one.order < barrier.order for one in inits):
                continue  # the others wait in that one: check_late_start
            guard = next((one for one in work.guards if one.main is True), None)
            guard = guard or others_wait(program, work, barrier)
            if guard is None or guard.test in [one.test for one in barrier.guards if one.holds]:
                continue
            if any(c.order > work.order and c.order < barrier.order for c in program.backwards):
                continue
            yield program.finding(
                "rank0-preprocess-timeout",
                how_loud(work),
                guard,
                what=(
                    f"rank 0 prepares data (line {work.line}) while the others wait in the barrier "
                    f"of line {barrier.line}: after 10 minutes (NCCL) they give up"
                ),
                fix="init_process_group(..., timeout=timedelta(hours=2)), or prepare it beforehand",
                seen=(work, barrier),
            )
            return


def others_wait(program: Program, work: Call, release: Call) -> Guard | None:
    """`if rank != 0: barrier()` before the work, which `if rank == 0: barrier()` ends."""
    if not any(one.main is True for one in release.guards):
        return None
    for barrier in program.calls("torch.distributed.barrier"):
        if barrier.order < work.order and barrier.frames == work.frames[: len(barrier.frames)]:
            for guard in barrier.guards:
                if guard.main is False and guard.how == "if":
                    return guard
    return None


def is_long(work: Call) -> bool:
    return is_download(work) or is_preprocessing(work)


def is_download(work: Call) -> bool:
    if work.own is not None:
        return "download" in work.own.name.lower()
    if work.method in {"prepare_data", "download"} and work.receiver is not None:
        return work.receiver.has_kind("dataset")
    return work.name in DOWNLOADS


def is_preprocessing(work: Call) -> bool:
    if work.own is not None:
        return any(word in work.own.name.lower() for word in ("preprocess", "tokenize"))
    if work.method not in LONG_WORK or work.receiver is None:
        return False
    return work.receiver.has_kind("dataset")


def how_loud(work: Call) -> Severity:
    """Only preprocessing of data that is not known to be small takes minutes as a rule."""
    small = work.receiver is not None and is_small(work.receiver)
    return Severity.INFO if small or not is_preprocessing(work) else Severity.WARNING


def check_late_start(program: Program, context: Context) -> Iterator[Finding]:
    """Rank 0 prepares data before it comes to init_process_group, where the others wait."""
    for init in program.calls(INIT_GROUP):
        if init.open_ended or init.argument(None, "timeout") is not None:
            continue
        for work in sorted(program.all_calls, key=is_download):
            if work.order > init.order or work.root != init.root or not is_long(work):
                continue
            guard = next((one for one in work.guards if one.main is True), None)
            if guard is None or guard.test in [one.test for one in init.guards]:
                continue
            yield program.finding(
                "store-wait-timeout",
                how_loud(work),
                guard,
                what=(
                    f"rank 0 prepares data (line {work.line}) before it comes to line {init.line}, "
                    "where the others wait for it for 10 minutes at most"
                ),
                fix="prepare it before the launch, or pass init_process_group a longer timeout",
                seen=(work, init),
            )
            return


def check_long_evaluation(program: Program, context: Context) -> Iterator[Finding]:
    """One rank evaluates while the others wait, with the default time-out."""
    inits = program.calls(INIT_GROUP)
    if not inits or any(one.has_argument(None, "timeout") for one in inits):
        return
    if not program.wraps:
        return
    reported: set[int] = set()
    for call in program.forwards:
        guard = next((one for one in call.guards if one.main is True and one.how == "if"), None)
        model = call.forward_of
        if guard is None or model is None or any(one.wrapper is not None for one in model.any()):
            continue
        if not any(one.over_batches for one in call.loops if one.depth >= guard.depth):
            continue
        at = call.at_depth(guard.depth)
        if id(at) in reported:
            continue
        reported.add(id(at))
        yield program.finding(
            "rank0-only-validation",
            Severity.INFO,
            at,
            what="the main process evaluates alone: the others give up after 10 minutes (NCCL)",
            fix="evaluate on all ranks, or give init_process_group a longer timeout",
            seen=(guard, call),
        )


RULES = (
    check_long_evaluation,
    check_long_wait,
    check_late_start,
)

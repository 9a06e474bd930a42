"""A proof as one readable screen of plain text."""

from collections.abc import Iterator, Sequence

from paceline.prove.compare import Compared
from paceline.prove.proof import Collective, Proof, StageProof
from paceline.report.table import wrapped
from paceline.units import bytes_apart, format_bytes, format_seconds

_WIDTH = 12
_NUM_COLLECTIVES = 14
_COMMUNICATION = ("tensor", "context", "expert", "data")
_MOST_STAGES = 16


def format_proof(proof: Proof, compared: Compared) -> str:
    """Whether it fits, memory by part beside the estimate, collectives, the simulated step."""
    return "\n".join(
        (
            *_verdict(compared),
            *_headline(proof, compared.engine),
            *_memory(proof, compared),
            *_stages(proof),
            *_collectives(proof.fullest),
            *_time(proof, compared),
            *_notes(proof),
        )
    )


def _row(label: str, text: str) -> str:
    return f"{label:<{_WIDTH}}{text}"


def _verdict(compared: Compared) -> Iterator[str]:
    """What was asked, first."""
    proved, reserve = compared.proved_bytes, compared.reserve_bytes
    needed, limit = bytes_apart(proved + reserve, compared.limit_bytes)
    whose = " (Paceline's own runtime)" if compared.engine else ""
    yield from wrapped(
        _row("fits" if compared.fits else "too large", ""),
        f"{needed} of the {limit} that a rank may use{whose}: {format_bytes(proved)} proved, "
        f"{format_bytes(reserve)} estimated",
    )


def _headline(proof: Proof, engine: str) -> Iterator[str]:
    ranks = [stage.rank for stage in proof.stages]
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    plural = "s" if len(ranks) > 1 else ""
    torch = proof.versions.get("torch", "?")
    yield _row("layout", proof.layout.name + proof.layout.recomputed)
    yield from wrapped(
        _row("ran", ""),
        f"the training step of rank{plural} {shown} of {proof.world_size}, on fake tensors "
        f"(shapes without values), no GPU (took {format_seconds(proof.seconds)}, torch {torch})",
    )
    yield from wrapped(_row("how", ""), proof.fullest.how)
    if engine:
        for label, line in zip(("engine", ""), whose_code(engine), strict=True):
            yield _row(label, line)


def whose_code(engine: str) -> tuple[str, str]:
    """Two lines: which code a proof ran for a job of another engine."""
    return (
        f"proved is Paceline's own runtime, not {engine}, which keeps other tensors;",
        f"for this job {engine}'s estimate counts",
    )


def _memory(proof: Proof, compared: Compared) -> Iterator[str]:
    stage = proof.fullest
    yield ""
    yield _row(
        "memory",
        f"{format_bytes(compared.proved_bytes)} in tensors at the peak, proved "
        f"(estimate {format_bytes(compared.estimated_bytes)}, "
        f"{_change(compared.estimated_bytes, compared.proved_bytes)})",
    )
    moment = stage.moment
    batch = f" of micro-batch {moment.micro_batch}" if moment.micro_batch else ""
    module = f", in {moment.module}" if moment.module else ""
    yield _row("", f"at the peak: {moment.phase}{batch}{module}")
    yield f"  {'':<16}{'proved':>12}{'estimated':>12}"
    for part in compared.parts:
        estimated = "?" if part.estimated_bytes is None else format_bytes(part.estimated_bytes)
        if part.proved_bytes or part.estimated_bytes:
            yield f"  {part.part:<16}{format_bytes(part.proved_bytes):>12}{estimated:>12}"
    reserve = format_bytes(compared.reserve_bytes)
    yield f"  {'not traced':<16}{'-':>12}{reserve:>12}  unused cache, libraries, saving"
    whole = format_bytes(compared.estimated_bytes + compared.reserve_bytes)
    yield f"  {'in all':<16}{format_bytes(compared.proved_bytes):>12}{whole:>12}"


def _stages(proof: Proof) -> Iterator[str]:
    if len(proof.stages) == 1:
        return
    yield ""
    yield _row("stages", f"{'rank':>6}{'blocks':>8}{'peak':>12}  when")
    for stage in proof.stages[:_MOST_STAGES]:
        yield _row(
            f"  {stage.stage}",
            f"{stage.rank:>6}{stage.num_blocks:>8}{format_bytes(stage.peak_bytes):>12}  "
            f"{stage.moment.phase}, micro-batch {stage.moment.micro_batch}",
        )
    if len(proof.stages) > _MOST_STAGES:
        yield f"  and {len(proof.stages) - _MOST_STAGES} more: --json"


def _collectives(stage: StageProof) -> Iterator[str]:
    if not stage.collectives:
        return
    where = f", rank {stage.rank}" if stage.rank else ""
    yield ""
    yield _row("collectives", f"one step{where}")
    head = f"  {'kind':<15}{'phase':<9}{'calls':>5}{'size each':>11} {'time':>10}"
    yield f"{head}  ranks; called during"
    ordered: Sequence[Collective] = sorted(
        stage.collectives, key=lambda each: (-(each.seconds or 0.0), -each.num_bytes)
    )
    for each in ordered[:_NUM_COLLECTIVES]:
        seconds = "" if each.seconds is None else f"{format_seconds(each.seconds):>10}"
        yield from wrapped(
            f"  {each.kind:<15}{each.phase:<9}{each.count:>5}"
            f"{format_bytes(each.num_bytes / each.count):>11} {seconds}  ",
            f"{each.group_size} ranks {each.link}; {each.where}",
        )
    if len(ordered) > _NUM_COLLECTIVES:
        yield f"  and {len(ordered) - _NUM_COLLECTIVES} more kinds: --json"


def _time(proof: Proof, compared: Compared) -> Iterator[str]:
    yield ""
    simulated = proof.simulated
    if simulated is None:
        yield _row("time", f"unknown: {proof.untimed}")
    else:
        estimate = compared.estimated_step_s
        beside = (
            ""
            if estimate is None
            else f" (estimate {format_seconds(estimate)}, {_change(estimate, simulated.step_s)})"
        )
        yield _row("time", f"{format_seconds(simulated.step_s)} a step, simulated{beside}")
        hidden = max(0.0, simulated.communication_s - simulated.exposed_s)
        bubble = f", bubble {format_seconds(simulated.bubble_s)}" if len(proof.stages) > 1 else ""
        is_slow = simulated.launch_s > 0.01 * simulated.step_s
        host = f", waiting for the host {format_seconds(simulated.launch_s)}" if is_slow else ""
        if simulated.offload_s:
            host += (
                f", copies to and from the host and its work {format_seconds(simulated.offload_s)}"
            )
        yield _row(
            "",
            f"compute {format_seconds(simulated.compute_s)}, communication "
            f"{format_seconds(simulated.exposed_s)} exposed and {format_seconds(hidden)} overlapped"
            f"{bubble}{host}, fixed {format_seconds(simulated.fixed_s)}",
        )
        if terms := compared.estimated_terms:
            busy = sum(terms.get(name, 0.0) for name in ("compute", "recompute"))
            again = " (with recompute)" if terms.get("recompute") else ""
            waits = sum(terms.get(name, 0.0) for name in _COMMUNICATION)
            yield from wrapped(
                _row("", ""),
                f"estimate: compute {format_seconds(busy)}{again}, communication "
                f"{format_seconds(waits)} exposed. Of the communication that can overlap compute, "
                "the simulation hides all, the estimate only a part",
            )
    stage = proof.fullest
    total = sum(stage.flops.values())
    unit, scale = ("TFLOP", 1e12) if total >= 1e11 else ("GFLOP", 1e9)
    phases = ", ".join(f"{name} {count / scale:,.1f}" for name, count in stage.flops.items())
    yield _row(unit, f"{total / scale:,.1f} a step on rank {stage.rank}: {phases}")


def _notes(proof: Proof) -> Iterator[str]:
    if proof.notes:
        yield ""
    for note in proof.notes:
        yield f"note: {note}"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "new"

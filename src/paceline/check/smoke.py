"""Which steps of a job's pipeline work, by what `paceline smoke` saw of a few of its steps.

Leaves out: whether the model learns anything worth having, and speed on other machines.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.launch.smoke import Seen
from paceline.parallel.shrink import rounding_bound
from paceline.record import events as log
from paceline.record.metrics import StepMetrics
from paceline.units import counted, format_bytes

_FP32 = 2.0**-24
_LOSS_TOLERANCE = 1e-3
"""Largest relative difference of a step's loss on one rank and on two, both in float32. 1.2e-7 was
measured on examples/tiny-lm, 10 steps, torch 2.13; the room for deeper models is a guess."""

_LEAST_GROWTH = 0.002
"""Share of its memory that a process gains in each of the last steps when it leaks. A guess: pages
that the allocator takes for good come in some steps, not in each."""

CAUSES: Mapping[str, str] = {
    "gradients": "look for detach(), no_grad() or a parameter that the loss does not use",
    "memory_leak": "look for a list that keeps losses with their graph: append(loss.item())",
    "nan_inf": "lower the learning rate, clip gradients; `paceline diagnose` reads the log",
}

KEEP = "add --keep DIR, then `paceline diagnose DIR` finds the cause"

Status = Literal["pass", "fail", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of the pipeline, or one check."""

    name: str
    status: Status
    found: str
    """What was seen, with its numbers; for `not judged`, why not."""

    seconds: float | None = None
    value: float | None = None
    """The number, in `unit`."""

    unit: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """All rows."""

    steps: tuple[Row, ...]
    checks: tuple[Row, ...]

    @property
    def verdict(self) -> Status:
        """`fail` where a row failed; else that of the training step, without which nothing is
        known."""
        if any(row.status == "fail" for row in (*self.steps, *self.checks)):
            return "fail"
        return next(row.status for row in self.steps if row.name == "training_step")


def judge(seen: Seen, asked: tuple[float, float] | None) -> Smoke:
    """The nine steps and the five checks, always all of them, in this order.

    Args:
        asked: What every training loss has to lie in; None where nobody gave one.
    """
    return Smoke(
        steps=(
            _data_loading(seen),
            _tokenization(seen),
            _model_loading(seen),
            _training_step(seen),
            _validation_step(seen),
            _checkpoint_save(seen),
            _checkpoint_load(seen),
            _inference(seen),
            _metrics(seen),
        ),
        checks=(
            loss_range([(line.step, line.loss) for line in seen.lines], asked),
            memory_leak(seen.memory),
            _gradients(seen),
            _nan_inf(seen),
            _two_ranks(seen),
        ),
    )


def judged(name: str, ok: bool, found: str, **more: object) -> Row:
    """A row that passes or fails."""
    return Row(name=name, status="pass" if ok else "fail", found=found, **more)  # type: ignore[arg-type]


def unjudged(name: str, why: str) -> Row:
    """A row of which nothing is known."""
    return Row(name=name, status="not judged", found=why)


_OWN_DATA = "the program reads its own data"


def _data_loading(seen: Seen) -> Row:
    if not seen.data_found:
        waits = [line.data_s for line in seen.lines if line.data_s is not None]
        if not waits:
            return unjudged("data_loading", _OWN_DATA)
        found = f"{_OWN_DATA}; {counted(len(waits), 'step')} had their samples"
        return judged(
            "data_loading", True, found, seconds=sum(waits), value=len(waits), unit="steps"
        )
    waits = [line.data_s or 0.0 for line in seen.lines]
    seconds = (seen.data_s or 0.0) + sum(waits)
    digests = {line.samples_digest for line in seen.lines}
    ok = bool(waits) and len(digests) == len(waits)
    found = f"{seen.data_found}; {len(digests)} different batches in {counted(len(waits), 'step')}"
    return judged("data_loading", ok, found, seconds=seconds, value=len(digests), unit="batches")


def _tokenization(seen: Seen) -> Row:
    if seen.tokens is None:
        return unjudged("tokenization", _OWN_DATA)
    ok = seen.tokens > 0 and bool(seen.text.strip())
    start = " ".join(seen.text.split())[:40]
    found = f"{seen.tokens} tokens of the first sample decode to {start!r}"
    return judged("tokenization", ok, found, seconds=seen.token_s, value=seen.tokens, unit="tokens")


def _model_loading(seen: Seen) -> Row:
    if not seen.lines:
        return judged("model_loading", False, f"no step was reached: {seen.why_failed}")
    seconds = _until_first_step(seen.events, seen.lines)
    known = "the run failed" if seen.parameters is None else f"{seen.parameters:,} parameters"
    found = f"{known}; the time includes imports"
    return judged(
        "model_loading", True, found, seconds=seconds, value=seen.parameters, unit="parameters"
    )


def _until_first_step(events: Sequence[log.AnyEvent], lines: list[StepMetrics]) -> float | None:
    """Seconds from the start of rank 0's process until its first step: imports, model, state."""
    began = next((event.at for event in events if isinstance(event, log.WorkerStarted)), None)
    if began is None or not lines:
        return None
    return max(0.0, lines[0].at - (lines[0].step_s or 0.0) - began)


def _training_step(seen: Seen) -> Row:
    lines = seen.lines
    losses = [line.loss for line in lines if line.loss is not None]
    times = [line.step_s for line in lines if line.step_s is not None]
    mean_s = sum(times) / len(times) if times else None
    ok = seen.why_failed is None and all(line.applied for line in lines)
    ok = ok and len(lines) == seen.asked_steps
    found = counted(len(lines), "step")
    if len(lines) < seen.asked_steps:
        found += f" of {seen.asked_steps}"
    if losses:
        found += f", loss {losses[0]:.4g} to {losses[-1]:.4g}"
    rates = [line.tokens_per_s for line in lines[1:] if line.tokens_per_s is not None]
    if rates:
        found += f", {sorted(rates)[len(rates) // 2]:,.0f} tokens/s"
    if seen.why_failed is not None:
        found += f"; failed: {seen.why_failed}"
    fix = "" if ok else KEEP
    return judged(
        "training_step", ok, found, seconds=sum(times) or None, value=mean_s, unit="s/step", fix=fix
    )


def _validation_step(seen: Seen) -> Row:
    found = [event for event in seen.events if isinstance(event, log.Evaluated)]
    if not found:
        return unjudged("validation_step", "the job holds nothing out in these steps")
    last = found[-1]
    return judged(
        "validation_step",
        last.loss is not None and math.isfinite(last.loss),
        f"evaluation loss {_number(last.loss)} after step {last.step}",
        seconds=last.seconds,
        value=last.loss,
        unit="nats/token",
    )


def _checkpoint_save(seen: Seen) -> Row:
    failed = [event for event in seen.events if isinstance(event, log.CheckpointFailed)]
    if failed:
        return judged("checkpoint_save", False, f"step {failed[0].step}: {failed[0].reason}")
    saved = [event for event in seen.events if isinstance(event, log.CheckpointSaved)]
    if not saved:
        return unjudged("checkpoint_save", "no checkpoint was committed in these steps")
    last = saved[-1]
    size = "" if last.num_bytes is None else f", {format_bytes(last.num_bytes)}"
    found = f"{counted(len(saved), 'checkpoint')}, the last of step {last.step}{size}"
    found += f"; {seen.damage or 'every hash matches'}"
    return judged(
        "checkpoint_save",
        seen.damage is None,
        found,
        seconds=last.write_s,
        value=last.num_bytes,
        unit="bytes",
    )


def _checkpoint_load(seen: Seen) -> Row:
    if seen.again is None:
        return unjudged("checkpoint_load", "there is no checkpoint to load")
    began = [event for event in seen.again.events if isinstance(event, log.TrainingStarted)]
    half = seen.asked_steps // 2
    loaded = bool(began) and began[0].checkpoint is not None
    seconds = _until_first_step(seen.again.events, seen.again.lines)
    if seen.again.digest is None or not loaded:
        return judged("checkpoint_load", False, f"no run from step {half}", seconds=seconds)
    same = seen.again.digest == seen.digest
    words = "equal" if same else "differ"
    found = (
        f"from step {half} to {seen.asked_steps}: parameters and optimizer state {words} "
        f"(SHA-256 {seen.again.digest[:12]}"
        + (")" if same else f", not {(seen.digest or '')[:12]})")
    )
    fix = "" if same else "save and restore everything the steps use; `paceline verify` names it"
    return judged(
        "checkpoint_load", same, found, seconds=seconds, value=float(same), unit="equal", fix=fix
    )


def _inference(seen: Seen) -> Row:
    check = seen.inference
    if check is not None and check.problem is not None:
        return judged("inference", False, check.problem.what, seconds=seen.inference_s)
    if check is None or check.largest_difference is None:
        why = seen.why_no_inference or (check.not_made if check is not None else "")
        return unjudged("inference", why or "the run failed before it")
    found = (
        f"{counted(check.samples, 'sample')} through the exported model, largest logit "
        f"{_number(check.largest_logit)}, differs from the trained one by "
        f"{check.largest_difference:.2g}"
    )
    return judged(
        "inference",
        math.isfinite(check.largest_difference),
        found,
        seconds=seen.inference_s,
        value=check.largest_difference,
        unit="logit",
    )


def _metrics(seen: Seen) -> Row:
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "memory_bytes")
    named = [name for name in names if any(getattr(line, name) is not None for line in seen.lines)]
    if not named:
        return unjudged("metrics", "the run failed before it")
    evals = [event for event in seen.events if isinstance(event, log.Evaluated)]
    found = f"{len(seen.lines)} lines with {', '.join(named)}"
    if evals and evals[-1].loss is not None and evals[-1].loss < 700:
        found += f"; perplexity {math.exp(evals[-1].loss):.4g}"
    if evals and evals[-1].accuracy is not None:
        found += f"; accuracy {evals[-1].accuracy:.3f}"
    steps = [line.step for line in seen.lines]
    ok = steps == list(range(1, len(steps) + 1)) and len(named) == len(names)
    return judged("metrics", ok, found, value=len(named), unit="metrics")


def loss_range(losses: list[tuple[int, float | None]], asked: tuple[float, float] | None) -> Row:
    """Whether each loss, given with its step, lies in what was asked; None is not finite."""
    known = [loss for _, loss in losses if loss is not None]
    if not known:
        return unjudged("loss_range", "no loss was seen")
    was = f"losses {min(known):.4g} to {max(known):.4g}"
    if asked is None:
        return unjudged("loss_range", f"{was}; give --loss-range LOW:HIGH to check them")
    low, high = asked
    out = [step for step, loss in losses if loss is None or not low <= loss <= high]
    found = f"{was}, asked {low:g} to {high:g}"
    if out:
        found += f"; outside at step {out[0]}" + (f" and {len(out) - 1} more" if out[1:] else "")
    return judged("loss_range", not out, found, value=known[-1], unit="loss")


def memory_leak(memory: list[int]) -> Row:
    """Whether memory grew in every one of the last steps: warm-up and caches do not."""
    last = memory[len(memory) // 2 :]
    if len(last) < 4:
        why = f"{counted(len(memory), 'step')} with known memory; 8 are needed"
        return unjudged("memory_leak", why)
    gains = [after - before for before, after in pairwise(last)]
    grows = all(gain > _LEAST_GROWTH * last[0] for gain in gains)
    mean = sum(gains) / len(gains)
    found = (
        f"{format_bytes(max(memory))} of memory, {'+' if mean >= 0 else '-'}"
        f"{format_bytes(int(abs(mean)))} a step over the last {len(gains)}"
        + (", in every one of them" if grows else "")
    )
    fix = CAUSES["memory_leak"] if grows else ""
    return judged("memory_leak", not grows, found, value=mean, unit="bytes/step", fix=fix)


def _gradients(seen: Seen) -> Row:
    norms = [line.grad_norm for line in seen.lines if line.grad_norm is not None]
    missing = [line.step for line in seen.lines if line.grad_norm is None]
    if not norms and not missing:
        return unjudged("gradients", "the run failed before it")
    zero = [line.step for line in seen.lines if line.grad_norm == 0]
    frozen = seen.unchanged if seen.own_program is None else ()
    found = f"norm {min(norms, default=math.nan):.3g} to {max(norms, default=math.nan):.3g}"
    for words, steps in (("zero", zero), ("not finite", missing)):
        if steps:
            found += f"; {words} at step {steps[0]}"
    if seen.unchanged:
        found += f"; {counted(len(seen.unchanged), 'tensor')} did not change: {seen.unchanged[0]}"
    elif seen.parameters is not None:
        found += "; every tensor changed"
    ok = not (zero or missing or frozen)
    return judged(
        "gradients",
        ok,
        found,
        value=norms[-1] if norms else None,
        unit="norm",
        fix="" if ok else CAUSES["nan_inf" if missing else "gradients"],
    )


def _nan_inf(seen: Seen) -> Row:
    if not seen.lines:
        return unjudged("nan_inf", "no step was seen")
    bad = list(_not_finite(seen))
    checked = sum(line.loss is not None for line in seen.lines)
    found = "; ".join(bad[:3]) or f"{checked} losses, all finite"
    return judged(
        "nan_inf", not bad, found, value=len(bad), unit="bad", fix=CAUSES["nan_inf"] if bad else ""
    )


def _not_finite(seen: Seen) -> Iterator[str]:
    for line in seen.lines:
        for name in ("loss", "grad_norm"):
            if getattr(line, name) is None:
                yield f"{name} of step {line.step} is not finite"
    for event in seen.events:
        if isinstance(event, log.StepRefused):
            yield f"step {event.step} was refused: {event.reason}"


def _two_ranks(seen: Seen) -> Row:
    if seen.two is None:
        return unjudged("two_ranks", seen.why_not_two or "the run failed before it")
    if seen.two.digest is None:
        return judged("two_ranks", False, "the run on two ranks did not finish")
    both = zip(seen.lines, seen.two.lines, strict=False)
    pairs = [(a.loss, b.loss) for a, b in both if a.loss is not None and b.loss is not None]
    gaps = [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]
    bound = max(_LOSS_TOLERANCE, rounding_bound(4, _FP32))
    worst = max(gaps, default=math.inf)
    started = [event for event in seen.two.events if isinstance(event, log.TrainingStarted)]
    where = (
        f"{counted(started[0].world_size, 'rank')}, {started[0].backend}"
        if started
        else "two ranks"
    )
    ok = len(gaps) == len(seen.lines) and worst <= bound
    found = (
        f"{where}: losses of {len(gaps)} steps differ by {worst:.1e} at most (limit {bound:.0e})"
    )
    fix = "" if ok else "paceline verify JOB finds the first step and module that differ"
    return judged(
        "two_ranks", ok, found, seconds=seen.two.seconds, value=worst, unit="relative", fix=fix
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"

"""Which steps of a script's pipeline work, by what was seen of a few of its optimizer steps."""

from collections.abc import Iterator

from paceline.check.smoke import (
    CAUSES,
    KEEP,
    Row,
    Smoke,
    judged,
    loss_range,
    memory_leak,
    unjudged,
)
from paceline.launch.smoke_script import SeenRun, SeenScript
from paceline.record.script_observed import Act
from paceline.units import counted, format_bytes

_NO_STEP = "no step of a torch optimizer was seen"
_IN_THESE = "in these steps"


def judge_script(seen: SeenScript, asked: tuple[float, float] | None) -> Smoke:
    """The nine steps and the five checks of a script, always all of them, as `judge`."""
    rank = seen.one.ranks[0]
    steps = rank.steps
    losses = [(step, loss) for step, each in enumerate(steps, 1) for loss in each.losses]
    memory = [each.memory_bytes for each in steps if each.memory_bytes is not None]
    return Smoke(
        steps=(
            _data_loading(seen.one),
            _tokenization(seen.one),
            _model_loading(seen.one),
            _training_step(seen),
            _act(
                "validation_step",
                rank.validation,
                f"the script ran no validation (forward pass under no_grad) {_IN_THESE}",
            ),
            _checkpoint_save(rank.saves),
            _act("checkpoint_load", rank.reload, _not_tried(seen)),
            _act("inference", rank.inference, _not_tried(seen)),
            _metrics(seen.one),
        ),
        checks=(
            loss_range(losses, asked),
            memory_leak(memory),
            _gradients(seen.one),
            _nan_inf(seen.one),
            _two_ranks(seen),
        ),
    )


def _data_loading(run: SeenRun) -> Row:
    rank = run.ranks[0]
    if not rank.num_batches:
        return unjudged("data_loading", "the script reads no batch from a torch DataLoader")
    found = f"{rank.num_batches} batches"
    found += f", {rank.num_different} different" if rank.num_different else " without tensors"
    if rank.has_one_batch:
        found += "; an epoch gave one batch again and again"
    return judged(
        "data_loading",
        not rank.has_one_batch,
        found,
        seconds=rank.data_s,
        value=rank.num_different,
        unit="batches",
        fix="look at the dataset's __getitem__ and at the sampler" if rank.has_one_batch else "",
    )


def _tokenization(run: SeenRun) -> Row:
    rank = run.ranks[0]
    if rank.tokens is None or rank.text is None:
        return unjudged(
            "tokenization", "needs a batch with input_ids and one transformers tokenizer; not found"
        )
    start = " ".join(rank.text.split())[:40]
    found = f"{rank.tokens} tokens of the first sample decode to {start!r}"
    return judged("tokenization", bool(rank.text.strip()), found, value=rank.tokens, unit="tokens")


def _model_loading(run: SeenRun) -> Row:
    rank = run.ranks[0]
    if not rank.models:
        return unjudged("model_loading", "no module with trained parameters was called")
    found = f"{_listed(rank.models, ' and ')}, {rank.parameters:,} trained parameters"
    found += "; the time includes imports"
    return judged(
        "model_loading",
        True,
        found,
        seconds=run.until_forward_s,
        value=rank.parameters,
        unit="parameters",
    )


_FIXES = {
    "arguments are required": "arguments of the script follow --",
    "No such file": "files outside the script's folder are not in the copy: use --in-place",
}


def _training_step(seen: SeenScript) -> Row:
    run, rank = seen.one, seen.one.ranks[0]
    steps = rank.steps
    found = counted(len(steps), "step")
    if len(steps) < seen.asked_steps:
        found += f" of {seen.asked_steps}"
    if rank.num_optimizers > 1:
        found += f" of the first of {rank.num_optimizers} optimizers"
    if rank.num_idle:
        found += f", {counted(rank.num_idle, 'other optimizer')} did none and is not judged"
    losses = [loss for each in steps for loss in each.losses if loss is not None]
    if losses:
        found += f", loss {losses[0]:.4g} to {losses[-1]:.4g}"
    fix = ""
    ok = True
    if run.stood_at is not None:
        where = f", and stood at {run.stood_at}" if run.stood_at else ""
        ok, found = False, f"{found}; it had not ended after {seen.limit_s:g} s{where}"
        fix = "--timeout SECONDS gives it longer"
    elif run.why_failed is not None:
        ok, found = False, f"{found}; failed: {run.why_failed}"
        fix = next((fix for words, fix in _FIXES.items() if words in run.why_failed), KEEP)
    elif not steps:
        why = f"{_NO_STEP}: the script ended by itself after {run.seconds:.0f} s"
        if rank.troubles:
            why += f" ({rank.troubles[0]})"
        return unjudged("training_step", why)
    elif rank.unchanged is not None and len(rank.unchanged) == rank.trained:
        ok, found = False, f"{found}; no parameter changed"
        fix = CAUSES["gradients"]
    seconds = sum(each.seconds for each in steps)
    return judged(
        "training_step",
        ok,
        found,
        seconds=seconds or None,
        value=seconds / len(steps) if steps else None,
        unit="s/step",
        fix=fix,
    )


def _not_tried(seen: SeenScript) -> str:
    steps = seen.one.ranks[0].steps
    return f"{len(steps)} of {seen.asked_steps} steps were reached" if steps else _NO_STEP


_FOUND = {
    "validation_step": ("call", "{count} of {name} without gradients, outputs finite"),
    "checkpoint_load": (
        "tensor",
        "state of models and optimizers saved and loaded again: {count} equal",
    ),
    "inference": ("tensor", "output of two calls in eval mode: {count} equal and finite"),
}


def _act(name: str, act: Act | None, why_not: str) -> Row:
    if act is None:
        return unjudged(name, why_not)
    unit, found = _FOUND[name]
    found = found.format(count=counted(act.count, unit), name=act.name)
    if act.num_bytes:
        found += f", {format_bytes(act.num_bytes)}"
    return judged(
        name,
        act.problem is None,
        act.problem or found,
        seconds=act.seconds,
        value=act.count,
        unit=f"{unit}s",
    )


def _checkpoint_save(saves: list[Act]) -> Row:
    if not saves:
        return unjudged("checkpoint_save", f"the script saved nothing {_IN_THESE}")
    last = saves[-1]
    bad = next((f"{each.name}: {each.problem}" for each in saves if each.problem), None)
    found = f"{counted(len(saves), 'file')}, the last {last.name}: read back"
    return judged(
        "checkpoint_save",
        bad is None,
        bad or f"{found} equal, {counted(last.count, 'tensor')}, {format_bytes(last.num_bytes)}",
        seconds=last.seconds,
        value=last.num_bytes,
        unit="bytes",
    )


def _metrics(run: SeenRun) -> Row:
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_s")  # step_s is our own clock's
    named = [name for name in names if any(getattr(line, name) is not None for line in run.lines)]
    if not named:
        return unjudged(
            "metrics", f"no line with a metric's name and its number, as loss 1.5, {_IN_THESE}"
        )
    found = f"{counted(len(run.lines), 'line')} with {', '.join(named)}, printed or logged"
    return judged("metrics", True, found, value=len(named), unit="metrics")


def _gradients(run: SeenRun) -> Row:
    rank = run.ranks[0]
    norms = [each.grad_norm for each in rank.steps if each.grad_norm is not None]
    if not rank.steps:
        return unjudged("gradients", _NO_STEP)
    bad = [
        f"{'not finite' if each.grad_norm is None else 'zero'} at step {step}"
        for step, each in enumerate(rank.steps, 1)
        if not each.grad_norm
    ]
    found = f"norm {min(norms):.3g} to {max(norms):.3g}" if norms else "no norm is finite"
    if bad:
        found += f"; {bad[0]}" + (f" and {len(bad) - 1} more" if bad[1:] else "")
    if rank.no_gradient:
        found += f"; {counted(len(rank.no_gradient), 'tensor')} never had a gradient: "
        found += _listed(rank.no_gradient)
    if rank.unchanged is not None:
        found += f"; {rank.trained - len(rank.unchanged)} of {rank.trained} tensors changed"
        if others := [each for each in rank.unchanged if each not in rank.no_gradient]:
            found += f", not {_listed(others)}"
    is_dead = bool(rank.no_gradient) or any(each.grad_norm == 0 for each in rank.steps)
    is_wild = any(each.grad_norm is None for each in rank.steps)
    causes = {"nan_inf": is_wild, "gradients": is_dead}
    return judged(
        "gradients",
        not (is_dead or is_wild),
        found,
        value=norms[-1] if norms else None,
        unit="norm",
        fix="; ".join(CAUSES[name] for name, is_so in causes.items() if is_so),
    )


def _listed(names: list[str], between: str = ", ") -> str:
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return between.join(names[:3]) + more


def _nan_inf(run: SeenRun) -> Row:
    steps = run.ranks[0].steps
    if not steps:
        return unjudged("nan_inf", _NO_STEP)
    bad = list(_not_finite(run))
    checked = sum(len(each.losses) for each in steps)
    found = "; ".join(bad[:3]) or f"{checked} losses and {len(steps)} gradients, all finite"
    return judged(
        "nan_inf", not bad, found, value=len(bad), unit="bad", fix=CAUSES["nan_inf"] if bad else ""
    )


def _not_finite(run: SeenRun) -> Iterator[str]:
    for step, each in enumerate(run.ranks[0].steps, 1):
        if None in each.losses:
            yield f"loss of step {step} is not finite"
        if each.grad_norm is None:
            yield f"gradient of step {step} is not finite"


def _two_ranks(seen: SeenScript) -> Row:
    if seen.two is None:
        why = _not_tried(seen)
        backend = seen.one.ranks[0].backend
        if len(seen.one.ranks[0].steps) == seen.asked_steps:
            why = f"its process group is {backend}, and two ranks need two GPUs"
            if backend is None:
                why = "the script joins no process group; `paceline adapt` makes it one that does"
        return unjudged("two_ranks", why)
    two = seen.two
    counts = [len(each.steps) for each in two.ranks]
    where = f"{len(counts)} ranks, {two.ranks[0].backend}"
    if two.why_failed is not None or min(counts) < seen.asked_steps:
        why = two.why_failed or f"{min(counts)} of {seen.asked_steps} steps were seen"
        return judged("two_ranks", False, f"{where}: {why}", seconds=two.seconds)
    digests = {each.digest for each in two.ranks}
    if None in digests:
        return unjudged("two_ranks", f"{where}: each rank holds a shard, so nothing is compared")
    same = len(digests) == 1
    words = "equal" if same else "differ"
    return judged(
        "two_ranks",
        same,
        f"{where}: all trained parameters {words} after {counts[0]} steps",
        seconds=two.seconds,
        value=float(same),
        unit="equal",
        fix="" if same else "wrap the model: DistributedDataParallel, `paceline adapt`",
    )

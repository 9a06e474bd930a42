"""What goes wrong with batches on their way from a data set to the model."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Loop
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.samplers import PREPARES, samplers_of, training_loops
from paceline.check.lint.values import Value


def check_pinned_copies(program: Program, context: Context) -> Iterator[Finding]:
    """`non_blocking=True` copies of batches from pageable memory."""
    copies = [
        one
        for one in program.calls(method=("to", "cuda"))
        if (flag := one.argument(None, "non_blocking")) is not None
        and flag.const is True
        and one.receiver is not None
        and one.receiver.has_kind("batch")
    ]
    reported: set[int] = set()
    for copy in copies:
        for loop in copy.loops:
            for loader in loop.over.any() if loop.over is not None else ():
                call = loader.call
                if not isinstance(call, Call) or call.name != DATALOADER or id(call) in reported:
                    continue
                reported.add(id(call))
                if call.has_argument(7, "pin_memory") or program.framework in PREPARES:
                    continue
                yield program.finding(
                    "no-pin-memory",
                    Severity.INFO,
                    call,
                    what=(
                        f"line {copy.line} copies its batches with non_blocking=True, which does "
                        "nothing from pageable memory"
                    ),
                    fix="pass pin_memory=True",
                    seen=(copy,),
                )


def check_padded_evaluation(program: Program, context: Context) -> Iterator[Finding]:
    """Distributed evaluation counts the samples with which the sampler pads its last batches."""
    if program.framework in PREPARES:
        return
    training = training_loops(program)
    reported: set[Value] = set()
    for loop in program.loops:
        if loop in training or any(loop in one.loops for one in program.backwards):
            continue
        for sampler in samplers_of(loop):
            call = sampler.call
            if sampler in reported or not isinstance(call, Call) or call.open_ended:
                continue
            reported.add(sampler)
            if call.argument(5, "drop_last") is None and reduces_after(program, loop):
                yield program.finding(
                    "eval-duplicates",
                    Severity.INFO,
                    call,
                    what=(
                        "this sampler repeats samples until every rank has as many, and the "
                        f"evaluation in line {loop.line} counts them twice"
                    ),
                    fix="gather the samples' indices too and drop repeated ones, or divide evenly",
                    seen=(loop,),
                )


def reduces_after(program: Program, loop: Loop) -> bool:
    last = max(one.order for one in program.events if loop in one.loops)
    return any(one.order > last for one in program.calls("torch.distributed.all_reduce"))


def check_added_tokens(program: Program, context: Context) -> Iterator[Finding]:
    """New tokens, and an embedding without rows for them."""
    if program.has_call(method=("resize_token_embeddings",)) or program.mentions("resize_token"):
        return
    models = [
        one
        for one in program.all_calls
        if one.name.startswith("transformers.") and one.result.kind == "model"
    ]
    if not models:
        return
    for call in program.calls(method=("add_special_tokens", "add_tokens")):
        if call.receiver is None or not call.receiver.has_kind("tokenizer"):
            continue
        tokens = call.argument(0, "special_tokens_dict", "new_tokens")
        values = [*(tokens.entries or {}).values(), *(tokens.items or ())] if tokens else []
        if any(isinstance(one.const, str) for one in values):
            yield program.finding(
                "cublas-or-assert",
                Severity.INFO,
                call,
                what=(
                    f"the new tokens' ids are past the embedding of the model in line "
                    f"{models[0].line}, which is never resized: a device-side assert"
                ),
                fix="model.resize_token_embeddings(len(tokenizer)), or reuse eos_token as padding",
                seen=models[:1],
            )


RULES = (
    check_added_tokens,
    check_pinned_copies,
    check_padded_evaluation,
)

"""Re-entrant activation checkpointing under DDP, which sees one backward pass inside another."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Event
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.values import Value

KWARGS = "accelerate.utils.DistributedDataParallelKwargs"

ARGUMENTS = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")


def check_reentrant(program: Program, context: Context) -> Iterator[Finding]:
    """Re-entrant activation checkpointing under DDP marks parameters ready twice."""
    wraps = [one for one in program.calls(DDP, KWARGS) if not is_static(one)]
    if not wraps:
        return
    unused = [one for one in wraps if looks_for_unused(one, "find_unused_parameters")]
    reported: set[int] = set()
    for call in program.calls(
        "torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential"
    ):
        reentrant = call.argument(None, "use_reentrant")
        if (call.open_ended and reentrant is None) or id(call.node) in reported:
            continue
        if reentrant is not None and reentrant.const is not True:
            continue
        reported.add(id(call.node))
        severity = Severity.WARNING if reentrant is None else Severity.ERROR
        at = call.keyword_nodes.get("use_reentrant", call.node)
        yield reentrant_finding(program, severity, at, (unused or wraps)[0])
    for call in program.calls(method="gradient_checkpointing_enable"):
        if id(call.node) in reported:
            continue
        reported.add(id(call.node))
        given = call.argument(0, "gradient_checkpointing_kwargs")
        said = stated(given)
        if said is True:
            severity = Severity.ERROR if unused else Severity.INFO  # each used once: it works
        elif said is None and unused:
            severity = Severity.INFO  # the model's library decides which of the two it is
        else:
            continue
        yield reentrant_finding(program, severity, call, (unused or wraps)[0])


def stated(given: Value | None) -> bool | None:
    """`use_reentrant` of a dict of options; None where it is left out, False where unknown."""
    if given is None or given.const is None:
        return None
    if given.entries is None or given.attribute == "open":
        return False
    value = given.entries.get("use_reentrant")
    if value is None:
        return None
    return value.const is True


def check_trainer_arguments(program: Program, context: Context) -> Iterator[Finding]:
    """Re-entrant checkpointing by the Trainer's arguments; it looks for unused parameters only when
    told to."""
    for call in program.calls(*ARGUMENTS):
        on = call.argument(None, "gradient_checkpointing")
        if (
            on is None
            or on.const is not True
            or not looks_for_unused(call, "ddp_find_unused_parameters")
        ):
            continue
        others = [call.argument(None, name) for name in ("fsdp", "deepspeed")]
        if any(one is not None and one.const is not None for one in others):
            continue
        said = stated(call.argument(None, "gradient_checkpointing_kwargs"))
        if said is False:
            continue
        version = context.version("transformers")
        old = version is not None and version < (5,)  # since then it is not re-entrant by itself
        severity = Severity.ERROR if said or old else Severity.INFO
        at = call.keyword_nodes.get("gradient_checkpointing_kwargs", call.node)
        yield reentrant_finding(program, severity, at, call)


def reentrant_finding(
    program: Program, severity: Severity, at: ast.AST | Event, wrap: Call
) -> Finding:
    return program.finding(
        "ddp-ready-twice-reentrant",
        severity,
        at,
        what=(
            "re-entrant checkpointing runs its own backward pass inside DDP's: parameters are "
            "marked ready twice and DDP raises"
        ),
        fix="use_reentrant=False",
        seen=(wrap,),
    )


def looks_for_unused(call: Call, name: str) -> bool:
    given = call.argument(None, name)
    return given is not None and given.likely() is True


def is_static(call: Call) -> bool:
    static = call.argument(None, "static_graph")
    return call.open_ended or (static is not None and static.const is not False)


RULES = (check_reentrant, check_trainer_arguments)

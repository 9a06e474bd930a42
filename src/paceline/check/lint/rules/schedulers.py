"""Schedulers that Accelerate steps once for each process."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import ACCELERATOR
from paceline.check.lint.program import Program
from paceline.check.lint.values import UNKNOWN, Value


def check_scheduler_length(program: Program, context: Context) -> Iterator[Finding]:
    """Accelerate steps a prepared scheduler once for each process."""
    accelerators = program.calls(ACCELERATOR)
    if not accelerators or (context.num_processes or 2) < 2:
        return
    options = ("step_scheduler_with_optimizer", "split_batches", "dataloader_config")
    if any(call.has_argument(None, *options) for call in accelerators):
        return
    prepared = [
        source
        for call in program.calls(f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_scheduler")
        for arg in call.args
        for source in arg.origins()
    ]
    for call in program.all_calls:
        steps = call.argument(None, "num_training_steps")
        if steps is None or call.result not in prepared:
            continue
        if any(str(one.const).startswith("constant") for one in call.args):
            continue
        text = "" if steps.node is None else ast.unparse(steps.node)
        origins = " ".join(filter(None, (one.label for one in steps.origins())))
        if "num_processes" in text + origins or "world" in (text + origins).lower():
            continue
        if steps.likely(UNKNOWN) is UNKNOWN and not _counts_prepared(program, steps):
            continue
        if _mentions_processes(steps):
            continue
        yield program.finding(
            "accelerate-scheduler-steps-xN",
            call,
            what="accelerator.prepare() makes the scheduler step once a process at every step: the "
            "rate has reached its end after 1/num_processes of num_training_steps",
            fix="num_training_steps=steps * accelerator.num_processes, or do not prepare it",
        )


def _mentions_processes(value: Value) -> bool:
    return any("num_processes" in (one.label or one.attribute or "") for one in value.origins())


def _counts_prepared(program: Program, steps: Value) -> bool:
    """Whether the number is of steps of a loader that was prepared already: of one process."""
    measured = [
        one.call.argument(0) or Value()
        for one in steps.origins()
        if isinstance(one.call, Call) and one.call.name == "builtins.len"
    ]
    return any(one.instance == "accelerate.prepared" for each in measured for one in each.any())


RULES = (check_scheduler_length,)

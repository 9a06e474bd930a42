"""What goes wrong with batches on their way from a data set to the model."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.samplers import PREPARES


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
                what = (
                    f"{copy.spot} copies its batches with non_blocking=True, which does "
                    "nothing from pageable memory"
                )
                fix = "pass pin_memory=True"
                yield program.finding("no-pin-memory", call, what, fix, seen=(copy,))


RULES = (check_pinned_copies,)
